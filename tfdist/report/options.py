"""The options of `python -m tfdist.report`."""

from dataclasses import dataclass
from typing import ClassVar

from tfdist.named_code import trust_option
from tfdist.options import CommandOptions, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ReportRunOptions(OptionGroup):
    """Output."""

    output: str = option(
        "",
        "file of the report; RUN/report.html by default, comparison.html for several runs",
        metavar="FILE",
    )
    trust_task: bool = trust_option()
    quiet: bool = option(False, "print nothing but errors")
    verbose_tensorflow: bool = option(False, "show TensorFlow's own messages")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    """The options of `python -m tfdist.report`."""

    rest: ClassVar[str] = " RUN [RUN ...]"

    run: ReportRunOptions = ReportRunOptions()
