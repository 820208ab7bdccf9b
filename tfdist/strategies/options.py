"""The flags of all strategies, as one group of options."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.options import OptionGroup, option
from tfdist.strategies.base import Strategy
from tfdist.strategies.registry import (
    AUTO,
    STRATEGIES,
    find_strategy,
    list_names,
    make_not_taken_error,
)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(OptionGroup):
    """Where it runs."""

    strategy: str = option(
        AUTO,
        "how the work is distributed, or package.module:Class for a strategy of your own",
        choices=(AUTO, *list_names()),
        is_open=True,
        result=False,
        must_match=True,
    )
    virtual_devices: int = option(
        0,
        "split the CPU, or the GPUs, into this many logical devices; 0: do not split",
        result=False,
        minimum=0,
    )

    @classmethod
    def widen(cls, chosen: Mapping[str, str]) -> type["StrategyOptions"]:
        """Returns the class with the options of every strategy, including a named one."""
        name = chosen.get("strategy", AUTO)
        others = () if name == AUTO or name in STRATEGIES else (find_strategy(name),)
        return _join((*STRATEGIES.values(), *others))

    def select(self) -> Strategy:
        """Returns the options of the chosen strategy; refuses those that it does not take."""
        chosen = find_strategy(self.strategy)
        taken = {item.name for item in dataclasses.fields(chosen)}
        own = {item.name for item in dataclasses.fields(StrategyOptions)}
        values = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in taken:
                values[item.name] = value
            elif item.name not in own and value != item.default:
                raise make_not_taken_error(self.strategy, item.name, value)
        return chosen(**values)

    def takes(self, item: dataclasses.Field) -> bool:
        """Returns whether an option has an effect on the chosen strategy."""
        takers = item.metadata.get("takers")
        return takers is None or self.strategy in takers


def make_strategy_options(**values: Any) -> StrategyOptions:
    """Returns the group with the options of every strategy."""
    return StrategyOptions.widen({"strategy": values.get("strategy", AUTO)})(**values)


@functools.cache
def _join(strategies: Sequence[type[Strategy]]) -> type[StrategyOptions]:
    """Returns a group with the options of several strategies, each once."""
    takers: dict[str, list[str]] = {}
    items: dict[str, dataclasses.Field] = {}
    for strategy in strategies:
        for item in dataclasses.fields(strategy):
            takers.setdefault(item.name, []).append(strategy.name)
            items.setdefault(item.name, item)
    fields = []
    for name, item in items.items():
        names = takers[name]
        prefix = f"{names[0]}: " if len(names) == 1 else ""
        metadata = {**item.metadata, "help": prefix + item.metadata["help"], "takers": names}
        field: Any = dataclasses.field(default=item.default, metadata=metadata)
        fields.append((name, item.type, field))
    joined = dataclasses.make_dataclass(
        "StrategyOptions", fields, bases=(StrategyOptions,), frozen=True, kw_only=True
    )
    joined.__doc__ = StrategyOptions.__doc__
    return joined
