"""A profile from predictions: a transformer on a machine that is not at hand.

Each cell is an estimate of `paceline plan --model`, so nothing runs. Beside the devices that lie as
close together as they can, each number of devices is predicted on nodes of their own: what the
distance of devices costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.plan import Mesh, Plan
from paceline.core.scaling_profile import RankPoint, RepeatedFigure, ScalingCurve, ScalingProfile
from paceline.perf.transformer import Risks, estimate_transformer
from paceline.studies.characterize.axes import BATCH, CHECKPOINTING, PRECISION
from paceline.studies.characterize.curves import with_efficiency
from paceline.studies.characterize.plans import precision_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.perf.transformer import Architecture
    from paceline.studies.characterize.axes import Cell

PREDICTED_AXES = (BATCH, PRECISION, CHECKPOINTING)


def predict_profile(
    machine: Machine,
    model: Architecture,
    cells: Sequence[Cell],
    axes: Mapping[str, Sequence[str]],
    *,
    jitter: float = 0.0,
    device_type: str = "",
) -> ScalingProfile:
    """Return the predicted profile of a transformer.

    Args:
        machine: with peaks and links.
        model: to train.
        cells: with a batch of each rank, of axes in `PREDICTED_AXES`.
        axes: of the cells.
        jitter: standard deviation of a rank's step over its mean, for which the others wait.
        device_type: for the scheduler.

    Raises:
        UsageError: an axis cannot be predicted, or a cell does not fit the machine.
    """
    for axis in axes:
        if axis not in PREDICTED_AXES:
            raise UsageError(
                f"the effect of {axis} cannot be predicted",
                where="paceline characterize --predict",
                why="what data take, and what compression leaves, has to be measured",
                fix=f"Vary {', '.join(PREDICTED_AXES)}, or run the sweep",
            )
    curves = []
    for name in dict.fromkeys(cell.name for cell in cells):
        own = [cell for cell in cells if cell.name == name]
        points = [_point(machine, model, cell, jitter) for cell in own]
        curves.append(
            ScalingCurve(name=name, settings=dict(own[0].settings), points=with_efficiency(points))
        )
    return ScalingProfile(
        program=model.name,
        machine=machine.name,
        device=machine.devices[0].name,
        device_type=device_type,
        source="predicted",
        axes={axis: tuple(values) for axis, values in axes.items()},
        curves=tuple(curves),
        repeats=0,
    )


def _point(machine: Machine, model: Architecture, cell: Cell, jitter: float) -> RankPoint:
    batch = int(cell.settings[BATCH]) * cell.ranks
    close = _estimate(machine, model, cell, batch, jitter)
    spread = None
    if 1 < cell.ranks <= machine.nodes and machine.devices[0].count > 1:
        device = replace(machine.devices[0], count=1)
        apart = replace(machine, devices=(device, *machine.devices[1:]))
        spread = close.step_time_s / _estimate(apart, model, cell, batch, jitter).step_time_s
    return RankPoint(
        ranks=cell.ranks,
        throughput=RepeatedFigure(
            value=batch / close.step_time_s,
            low=batch / close.high_s,
            high=batch / close.low_s,
        ),
        efficiency=1.0,
        step_s=close.step_time_s,
        phases={name: seconds for name, seconds in close.breakdown.items() if seconds},
        limit=close.limit,
        peak_memory_bytes=close.needed_memory_bytes,
        reduced_bytes=float(close.trained_parameter_bytes) if cell.ranks > 1 else 0.0,
        spread=spread,
    )


def _estimate(
    machine: Machine, model: Architecture, cell: Cell, batch: int, jitter: float
) -> Estimate:
    plan = Plan(
        mesh=Mesh(data=cell.ranks),
        nodes=-(-cell.ranks // machine.devices[0].count),
        precision=precision_of(cell.settings.get(PRECISION)),
        recompute="full" if cell.settings.get(CHECKPOINTING) == "on" else "none",
    )
    return estimate_transformer(machine, model, plan, batch, Risks(jitter=jitter))
