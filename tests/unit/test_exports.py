"""What each package offers: a name that comes or goes is decided here, not by accident."""

import ast
import importlib
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
EXPORTS = {
    "": ["__version__", "record", "step"],
    "cli": [],
    "cli.queue": ["queue"],
    "collectives": ["DType", "HostGroup", "KeyValueStore", "ReduceOp", "find_hosts"],
    "collectives.horovod": [
        "Average",
        "Compression",
        "DistributedOptimizer",
        "Max",
        "Min",
        "Product",
        "Sum",
        "allgather",
        "allgather_object",
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "alltoall",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "cross_rank",
        "cross_size",
        "grouped_allreduce",
        "init",
        "is_initialized",
        "local_rank",
        "local_size",
        "poll",
        "rank",
        "shutdown",
        "size",
        "synchronize",
    ],
    "collectives.transports": [],
    "core": [],
    "launch": [],
    "launch.startup": [],
    "launch.rendezvous": [],
    "perf": ["estimate"],
    "probe": [],
    "report": [],
    "report.advice": [],
    "report.page": [],
    "report.queue": [],
    "runs": [],
    "scheduler": [],
    "scheduler.formats": [],
    "scheduler.local": [],
    "scheduler.local.jobs": [],
    "scheduler.local.machine": [],
    "scheduler.local.protocol": [],
    "scheduler.local.queue": [],
    "scheduler.planning": [],
    "scheduler.policies": ["POLICIES"],
    "scheduler.rates": [],
    "scheduler.simulate": [],
    "scheduler.state": [],
    "schedules": [
        "Schedule",
        "Topology",
        "Transfer",
        "best_chunks",
        "binomial",
        "candidates",
        "chain",
        "chain_binomial",
        "chain_chain",
        "check",
        "fastest",
        "groups_of",
        "halving_doubling",
        "level_volumes",
        "recursive_doubling",
        "ring",
        "schedule_s",
        "torus",
        "two_level_leader",
        "two_level_sharded",
    ],
    "schedules.memory": [
        "ManagedTensor",
        "MemoryPlan",
        "RecomputedModule",
        "Replayed",
        "SpillTier",
        "StepProfile",
        "TensorAction",
        "least_budget_bytes",
        "load_solver",
        "plan_memory",
        "replay",
    ],
    "store": [
        "Archives",
        "CenterCrop",
        "CodecChoice",
        "Folder",
        "Loader",
        "LoaderConfig",
        "LoaderOptions",
        "Pack",
        "PackDataset",
        "PackOptions",
        "PackProgress",
        "PackSampler",
        "PackSummary",
        "RandomCrop",
        "SampleOrder",
        "Samples",
        "add_checksums",
        "append",
        "find_source",
        "open_pack",
        "pack",
        "plan_pack",
    ],
    "store.care": [],
    "store.feed": [],
    "store.feed.node": [],
    "store.format": [],
    "store.in_place": [],
    "store.read": [],
    "store.write": [],
    "store.write.index": [],
    "store.write.sources": [],
    "studies": [],
    "trace": [],
    "trace.analysis": ["Analysis", "analyse"],
    "trace.collectors": [],
    "trace.format": [],
    "trace.merge": ["Trace", "load_run", "merge"],
    "training": ["Epoch", "OutOfCore", "Prepared", "Trainer", "TrainingOptions", "prepare"],
    "training.engine": [],
    "training.compression": [
        "CompressionEstimate",
        "DGCOptions",
        "DeepGradientCompression",
        "DensitySchedule",
        "HalfCompression",
        "MomentumTakeover",
        "estimate",
        "measure",
        "register_hook",
        "register_powersgd",
    ],
    "training.optimizers": [
        "LAMB",
        "LARS",
        "LargeBatchRate",
        "LayerNorms",
        "ShardedNorms",
        "large_batch_schedule",
        "linear_scaling",
        "parameter_groups",
        "square_root_scaling",
    ],
    "training.out_of_core": [],
    "training.precision": ["LossScaler", "MasterWeights", "agree"],
}


def test_every_package_is_listed():
    found = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")}
    assert {".".join(path.parts) for path in found} == set(EXPORTS)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_package_offers_what_is_pinned_here(name):
    module = importlib.import_module(f"paceline.{name}".rstrip("."))
    assert sorted(getattr(module, "__all__", [])) == EXPORTS[name]
    for export in EXPORTS[name]:
        if export not in ("Loader", "PackDataset"):  # load torch
            assert getattr(module, export) is not None


@pytest.mark.parametrize("name", EXPORTS)
def test_a_package_says_what_it_is(name):
    path = SOURCE.joinpath(*name.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text
    assert "TODO" not in text
