"""The command line is a public surface: flags are frozen, and mapped to the configuration."""

import argparse
from typing import Any

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.runtime.api import cli, cli_generate
from coterie.runtime.api.cli_flags import byte_size, engine_flags
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine_args import engine_config_from_flags

ENGINE = """
    --attention-ranks --block-size --data-parallel-size --disaggregate
    --distributed-executor-backend --dtype --enable-expert-parallel --enable-prefix-caching
    --expert-ranks --fault-deadline-s --kernels --kv-cache-memory-bytes --load-format
    --max-model-len --max-num-batched-tokens --max-num-seqs --max-waiting --model
    --no-enable-prefix-caching --num-gpu-blocks-override --num-kv-blocks --num-redundant-experts
    --orphan-grace-s --pipeline-parallel-size --prefill-budget-ms --ray-address --seed
    --sequence-parallel-size --served-model-name --shutdown-timeout-s --skip-tokenizer-init
    --start-timeout-s --tensor-parallel-size --tokenizer --transport -dp -pp -tp
"""
SAMPLING = "--max-tokens --min-p --repetition-penalty --temperature --top-k --top-p"
COMMANDS = {
    "serve": ENGINE + "--api-key --host --max-body-bytes --port --rpc-port",
    "generate": ENGINE
    + SAMPLING
    + " --chat --ignore-eos --json --logprobs --min-tokens --n --prompt --prompt-token-ids"
    + " --sampling-seed --stop --stop-token-ids",
    "chat": ENGINE + SAMPLING + " --api-key --rpc --system --url",
    "bench": ENGINE
    + "--api-key --base-url --concurrency --ignore-eos --input-len --no-ignore-eos --num-prompts"
    + " --output --output-len --prompts-file --request-rate --temperature --workload-seed",
    "pull": "--force --pip-flags",
    "status": "--api-key --json --url",
    "plan": "--concurrency --context --device --devices --dtype --json --memory-utilization"
    + " --nodes --num-parameters --reserve-gib --slo-tpot --slo-ttft",
}


def parse(*argv: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(argv)


def config(*argv: str) -> EngineConfig:
    return engine_config_from_flags(**engine_flags(parse("serve", *argv)))


def test_commands_and_flags_are_frozen() -> None:
    parser = cli.build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: {option for action in command._actions for option in action.option_strings}
        for name, command in commands.choices.items()
    }
    common = {"-h", "--help", "--log-level"}
    assert found == {name: set(flags.split()) | common for name, flags in COMMANDS.items()}


def test_defaults_are_those_of_the_configuration() -> None:
    assert config() == EngineConfig()
    assert engine_flags(parse("bench")) == {"distributed_executor_backend": "mp"}
    args = parse("generate", "m", "--ray-address", "auto")
    assert engine_flags(args)["distributed_executor_backend"] == "ray"


def test_flags_reach_the_configuration() -> None:
    made = config(
        *("some/model", "-dp", "2", "--kv-cache-memory-bytes", "2GiB", "--max-num-seqs", "7"),
        *("--no-enable-prefix-caching", "--num-gpu-blocks-override", "9", "--dtype", "float32"),
        *("--orphan-grace-s", "3", "--shutdown-timeout-s", "4", "--start-timeout-s", "5"),
        *("--fault-deadline-s", "6", "--distributed-executor-backend", "mp", "--disaggregate"),
    )
    assert made.model.model == "some/model"
    assert made.model.dtype == "float32"
    assert made.parallel.data_parallel_size == 2
    assert made.parallel.disaggregate
    assert made.parallel.distributed_executor_backend == "mp"
    assert made.cache.kv_cache_memory_bytes == 2 << 30
    assert made.cache.num_kv_blocks == 9
    assert not made.cache.enable_prefix_caching
    assert made.scheduler.max_num_seqs == 7
    timeouts = made.timeouts
    assert (timeouts.orphan_grace_s, timeouts.shutdown_s) == (3, 4)
    assert (timeouts.start_s, timeouts.fault_s) == (5, 6)


def test_model_by_position_or_flag() -> None:
    assert config("a").model.model == "a" == config("--model", "a").model.model
    assert config("a", "--model", "a").model.model == "a"
    with pytest.raises(ConfigError, match="two models"):
        config("a", "--model", "b")


def test_sequence_parallel_is_refused() -> None:
    assert config("--sequence-parallel-size", "1") == EngineConfig()
    with pytest.raises(ConfigError, match="sequence-parallel"):
        config("--sequence-parallel-size", "2")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("2GiB", 2 << 30), ("2gi", 2 << 30), ("1.5M", 1_500_000), ("3 kB", 3000)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1", "2TB", "1..2"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


def test_prompts_keep_their_order() -> None:
    args = parse(
        *("generate", "m", "--prompt", "a", "b", "--prompt-token-ids", "1,2", "3"),
        *("--prompt", "c"),
    )
    assert args.prompts == ["a", "b", [1, 2], [3], "c"]
    assert args.model_position == "m"


def test_generate_sampling_params() -> None:
    args = parse(
        *("generate", "m", "--prompt", "a", "--n", "2", "--stop", "x", "--stop", "y"),
        *("--seed", "5", "--stop-token-ids", "1,2", "--logprobs", "3", "--ignore-eos"),
    )
    params = cli_generate.sampling_params(args)
    assert (params.n, params.stop, params.stop_token_ids) == (2, ("x", "y"), (1, 2))
    assert (params.seed, params.logprobs, params.ignore_eos) == (5, 3, True)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("generate", "m"), 2, "--prompt"),
        (("serve", "/nonexistent/model"), 2, "/nonexistent/model"),
        (("serve", "--rpc-port", "70000", "--port", "0"), 2, "--rpc-port"),
        (("serve", "--host", "203.0.113.1"), 2, "--port"),
        (("chat", "m", "--url", "http://x"), 2, "--url"),
        (("chat", "--rpc", "nowhere"), 2, "HOST:PORT"),
        (("bench", "--concurrency", "1,a"), 2, "--concurrency"),
        (("bench", "--input-len", "0"), 2, "--input-len"),
        (("bench", "--request-rate", "0"), 2, "--request-rate"),
        (("bench", "--num-prompts", "-1"), 2, "--num-prompts"),
        (("bench", "--temperature", "-1"), 2, "temperature"),
        (("bench", "--prompts-file", "/nonexistent"), 2, "/nonexistent"),
        (("bench", "--output", "/dev/null/x/y"), 2, "--output"),
        (("bench", "--base-url", "http://x", "--max-num-seqs", "3"), 2, "--max-num-seqs"),
        (("serve", "--port", "8123", "--rpc-port", "8123"), 2, "--rpc-port"),
        (("generate", "m", "--prompt", ""), 2, "--prompt"),
        (("generate", "m", "--prompt", "x", "--max-tokens", "0"), 2, "max_tokens"),
        (("generate", "m", "--prompt", "x", "--temperature", "-1"), 2, "temperature"),
        (("generate", "m", "--prompt", "x", "--stop", ""), 2, "stop"),
        (("generate", "m", "--chat", "--prompt-token-ids", "1"), 2, "--chat"),
        (("chat", "--temperature", "-1"), 2, "temperature"),
        (("chat", "m", "--api-key", "k"), 2, "--api-key"),
        (("chat", "--url", "http://x", "--max-num-seqs", "3"), 2, "--max-num-seqs"),
        (("chat", "--rpc", "x:1", "--dtype", "float32"), 2, "--dtype"),
        (("chat", "--url", "http://127.0.0.1:1"), 1, "http://127.0.0.1:1"),
        (("chat", "--rpc", "127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("chat", "--url", "nonsense"), 1, "nonsense"),
        (("status", "--url", "http://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("status", "--url", "nonsense"), 1, "nonsense"),
        (("pull", "gpt-99"), 2, "smollm2-moe"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int, says: str
) -> None:
    got, out, err = run(capsys, *argv)
    assert got == code, err
    assert out == ""
    lines = err.strip().splitlines()
    assert lines[-1].startswith("coterie: error: ")
    assert says in lines[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv", [("fly",), ("serve", "--dtype", "int3"), ("serve", "--max-model", "5"), ()]
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: tuple[Any, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    command = " ".join(["coterie", *(argv[:1] if argv[:1] == ("serve",) else ())])
    error, hint = err.splitlines()
    assert error.startswith(f"{command}: error: ")
    assert (out, hint) == ("", f"See {command} --help.")


@pytest.mark.parametrize(
    ("command", "default"), [("serve", "ray"), ("generate", "mp"), ("chat", "mp"), ("bench", "mp")]
)
def test_help_names_the_launcher_of_the_command(
    capsys: pytest.CaptureFixture[str], command: str, default: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"Ray actors or plain processes; default {default}" in text
    assert engine_flags(parse(command))["distributed_executor_backend"] == default


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"coterie {coterie.__version__}\n"
