"""When and how workers average the weights that each of them trains by itself."""

from dataclasses import dataclass

from tfdist.errors import TfdistError
from tfdist.options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class Averaging(OptionGroup):
    """The averaging of local SGD.

    Args:
      sync_every: steps between two averagings, 1 or more.
      average_optimizer: whether to average the optimizer's state too, such as momentum.
      outer_learning_rate: the learning rate of the outer step; 1 is plain averaging if there is no
        outer momentum.
      outer_momentum: the momentum of the outer step, in [0, 1).
    """

    sync_every: int = option(8, "steps between two averagings of the weights", minimum=1)
    average_optimizer: bool = option(True, "average the optimizer's state as well")
    outer_learning_rate: float = option(1.0, "learning rate of the averaging step", above=0)
    outer_momentum: float = option(0.0, "momentum of the averaging step; 0: none", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_momentum >= 1:
            raise TfdistError(f"`outer_momentum={self.outer_momentum}` is not below 1. Try 0.5.")
