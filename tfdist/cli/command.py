"""Runs a command: help, one-line errors, exit status."""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cli.arguments import print_help
from tfdist.cli.config import PRINT_CONFIG, format_config
from tfdist.cli.flags import format_help, is_help, name_flags, parse_flags
from tfdist.cli.inputs import check_inputs
from tfdist.cli.output import lenient_output
from tfdist.cli.quiet import start_tensorflow_quietly
from tfdist.errors import TfdistError, describe_file_error, make_printable
from tfdist.memory import describe_lack
from tfdist.options import CommandOptions
from tfdist.stopping import EXIT_INTERRUPTED

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1


def run_command(
    program: str,
    run: Callable[[Any], int],
    arguments: Sequence[str] | None = None,
    *,
    options_class: type[CommandOptions],
    others: Sequence[type[CommandOptions]] = (),
    needs_tensorflow: bool = True,
    check: Callable[[Any], None] | None = None,
    is_text: bool = False,
    is_script: bool = False,
) -> int:
    """Parses the command line, runs a command and returns its exit status.

    A command goes on where its output is lost: see `lenient_output`.

    Args:
      program: the module's name, for `--help`.
      run: the command, which takes the options and returns the exit status.
      arguments: the command line without the program; `sys.argv` by default.
      options_class: the class of the command's options; their group `run` says what is printed.
      others: classes of other commands' options, which errors may name as well.
      needs_tensorflow: whether to start TensorFlow first, quietly.
      check: raises a TfdistError if the options are wrong; before TensorFlow is started.
      is_text: whether what the command prints is all that it makes.
      is_script: whether it runs a user's script, whose own errors keep their traceback.

    Returns:
      What `run` returns; 2 after bad input; 1 after a failure that has its own message, or if a
      text could not be written; 130 if Ctrl-C interrupts the command. Unexpected exceptions keep
      their traceback, but not those that say that the memory is full, or what is wrong with a file.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    wanted = [argument for argument in arguments if argument != PRINT_CONFIG]
    shows_help = any(map(is_help, arguments))

    def run_parsed() -> int:
        if shows_help:
            print_help(format_help(program, options_class, arguments))
            return 0
        options: Any = parse_flags(options_class, wanted)
        if len(wanted) < len(arguments):
            print(format_config(options.to_dict()))
            return 0
        if check is not None:
            check(options)
        check_inputs(options)
        if needs_tensorflow and not options.run.verbose_tensorflow:
            start_tensorflow_quietly()
        return run(options)

    with lenient_output() as is_lost:
        status = _run_with_one_line(run_parsed, options_class, *others, is_script=is_script)
        is_text = is_text or shows_help or len(wanted) < len(arguments)
        return EXIT_FAILED if status == 0 and is_text and is_lost() else status


def _run_with_one_line(
    run: Callable[[], int], *commands: type[CommandOptions], is_script: bool
) -> int:
    """Returns what a function returns, or the exit status of its error, which costs one line."""
    try:
        return run()
    except (TfdistError, OSError) as error:
        if is_script and isinstance(error, OSError) and not _is_own(error):
            raise
        lack = describe_file_error(error) if isinstance(error, OSError) else None
        text = name_flags(TfdistError(lack) if lack else error, *commands)
        print(f"tfdist: {make_printable(' '.join(text.split()))}", file=sys.stderr)
        return error.exit_status if isinstance(error, TfdistError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        lack = describe_file_error(error) or describe_lack(error)
        if lack is None:
            raise
        print(f"tfdist: {name_flags(TfdistError(lack), *commands)}", file=sys.stderr)
        return EXIT_FAILED


def _is_own(error: BaseException) -> bool:
    """Returns whether tfdist has raised an error, rather than what it calls."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "tfdist"
