"""Flags by name, as the CLI and LLM take them."""

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.runtime.config import EngineConfig
from coterie.runtime.engine_args import engine_config_from_flags


def test_flags_reach_their_section() -> None:
    config = engine_config_from_flags(
        model=Path("/models/tiny"),
        dtype="float32",
        data_parallel_size=2,
        block_size=8,
        max_num_seqs=4,
        orphan_grace_s=3,
        start_timeout_s=60.0,
        max_model_len=None,
    )
    assert config.model.model == "/models/tiny"
    assert config.model.dtype == "float32"
    assert config.parallel.data_parallel_size == 2
    assert config.cache.block_size == 8
    assert config.scheduler.max_num_seqs == 4
    assert config.timeouts.orphan_grace_s == 3.0
    assert config.timeouts.start_s == 60.0


def test_no_flags_are_the_defaults() -> None:
    assert engine_config_from_flags() == EngineConfig()


def test_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown option 'blocksize'; did you mean 'block_size'"):
        engine_config_from_flags(blocksize=8)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dtype": "int8"}, "--dtype must be one of auto, bfloat16, float32"),
        ({"max_model_len": "many"}, "--max-model-len must be of type int"),
        ({"data_parallel_size": True}, "--data-parallel-size must be of type int"),
        ({"block_size": 3}, "power of two"),
        ({"disaggregate": "yes"}, "--disaggregate must be of type bool"),
    ],
)
def test_wrong_values_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_config_from_flags(**flags)
