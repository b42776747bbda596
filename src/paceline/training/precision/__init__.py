"""Mixed precision: what must happen between a backward pass and the optimizer's step.

::

    forward in fp16 or bf16          torch.autocast: weights stay fp32
    backward of loss x scale         `scaling`: LossScaler.scale_outputs
    gradients reduced over ranks
    unscale
    all ranks agree                  `agreement`: one all-reduce of one number
        not finite: no gradients, so that the step touches no state
    clip -> norms of LARS, compression -> step
    next scale

`masters` keeps fp32 copies of weights that are stored in fp16 or bf16. Importing this package
imports torch.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from paceline.training.precision.agreement import agree
from paceline.training.precision.masters import MasterWeights
from paceline.training.precision.scaling import LossScaler

__all__ = ["LossScaler", "MasterWeights", "agree"]
