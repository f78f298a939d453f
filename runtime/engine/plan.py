"""Everything that is decided and checked before the first process starts. Starts nothing.

A configuration that cannot work is refused here, with the sentence that says what to change.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from coterie.attention.models.checkpoint import model_hash, open_weights
from coterie.attention.models.config import ModelConfig
from coterie.errors import ConfigError
from coterie.runtime.cluster.layout import Layout, resolve_layout
from coterie.runtime.config import EngineConfig, ModelArgs
from coterie.runtime.model_store import DEMO_MODELS, resolve_model
from coterie.runtime.spec import RankSpec
from coterie.runtime.tokenizer import Tokenizer, check_folder, has_tokenizer

_log = logging.getLogger("coterie.engine")


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """What will run."""

    config: EngineConfig
    model_dir: Path
    model_config: ModelConfig
    model_hash: str
    layout: Layout
    max_model_len: int
    served_model_name: str
    tokenizer_dir: Path | None
    """None: token ids only."""

    def specs(self, deployment: str, runtime_dir: Path, token: bytes) -> list[RankSpec]:
        """One spec per seat."""
        layout = self.layout
        return [
            RankSpec(
                deployment=deployment,
                seat=seat,
                roles=layout.roles(seat),
                attention_seats=layout.attention_seats,
                expert_seats=layout.expert_seats,
                placement=layout.placement,
                config=self.config,
                model_dir=str(self.model_dir),
                max_model_len=self.max_model_len,
                eos_token_ids=self.model_config.eos_token_ids,
                runtime_dir=str(runtime_dir),
                token=token,
                layout_hash=layout.hash(),
                model_hash=self.model_hash,
            )
            for seat in layout.seats
        ]


def make_plan(config: EngineConfig) -> DeploymentPlan:
    """Check configuration, model files and layout.

    Raises:
        ConfigError: flags, config.json, weights or tokenizer do not work.

    Blocks: reads the checkpoint's headers and the tokenizer's files.
    """
    args = config.model
    model_dir = resolve_model(args.model)
    model_config = ModelConfig.from_hf(model_dir)
    layout = resolve_layout(config.parallel, model_config, num_cpus())
    max_model_len = model_config.max_context_len
    if args.max_model_len is not None:
        if args.max_model_len < 2:
            raise ConfigError(f"--max-model-len must be at least 2, got {args.max_model_len}")
        model_config.check_max_model_len(args.max_model_len)
        max_model_len = args.max_model_len
    open_weights(model_dir, model_config, args.load_format, args.seed).validate(model_config)
    tokenizer_dir = find_tokenizer(args, model_dir)
    if tokenizer_dir is not None:
        check_folder(tokenizer_dir)
    return DeploymentPlan(
        config=config,
        model_dir=model_dir,
        model_config=model_config,
        model_hash=model_hash(model_dir, args.load_format),
        layout=layout,
        max_model_len=max_model_len,
        served_model_name=args.served_model_name or Path(args.model).name or str(model_dir),
        tokenizer_dir=tokenizer_dir,
    )


def find_tokenizer(args: ModelArgs, model_dir: Path) -> Path | None:
    """The tokenizer's folder, named as a model is; it need not hold a config.json.

    Returns:
        None when token ids only are served: asked for, or dummy weights without a tokenizer.

    Raises:
        ConfigError: a demo model that is not there.
    """
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is not None:
        folder = Path(args.tokenizer).expanduser()
        if not folder.is_dir() and args.tokenizer in DEMO_MODELS:
            return resolve_model(args.tokenizer)
        return folder
    if args.load_format == "dummy" and not has_tokenizer(model_dir):
        return None
    return model_dir


def load_tokenizer(plan: DeploymentPlan) -> Tokenizer | None:
    """The tokenizer of the plan, or None when token ids only are served.

    Raises:
        ConfigError: it cannot be read.

    Blocks: seconds, for imports.
    """
    if plan.tokenizer_dir is not None:
        return Tokenizer.load(plan.tokenizer_dir)
    if not plan.config.model.skip_tokenizer_init:
        _log.warning("%s has no tokenizer: only token ids are served", plan.model_dir)
    return None


def num_cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
