# SPDX-License-Identifier: Apache-2.0
"""Train: verl's main with a quiet console.

    digen train digen_quickstart
    digen train digen_sd3+gpu24 data.train_files=prompts.jsonl trainer.n_gpus_per_node=8
    digen train --config-path "$PWD" --config-name my_job trainer.total_epochs=3

RECIPE KEY=VALUE ... are the words of `python -m verl.trainer.main_ppo recipe=RECIPE KEY=VALUE ...`, which this starts
in a process of its own. The console has a line per step, validations, warnings and links; RUN/console.log has
everything that verl and Ray print.

Ctrl-C ends the run after its step, with a checkpoint where trainer.save_freq > 0; Ctrl-C once more ends it at once.
`touch RUN/stop` does what the first one does.

Exit code: 0, 1 if the run failed, 2 if it was refused before it began, 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.resources import files

from verl_digen.tools.train.launcher import launch, summary

NAME = "train"
ALL_RECIPES = "docs/models.md and docs/algorithms/README.md have all of them"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config-path", metavar="DIR", help="folder of a config of your own")
    parser.add_argument("--config-name", metavar="NAME", help="name of a config of your own, which may name the recipe")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="RECIPE KEY=VALUE ...", help="words for verl, as for its main"
    )


def run(args: Namespace) -> int:
    """Train and say how it went."""
    folder = os.path.abspath(args.config_path) if os.path.isdir(args.config_path or "") else args.config_path
    given = ("--config-path", folder), ("--config-name", args.config_name)  # Hydra looks beside verl's main
    options = [word for option in given if option[1] is not None for word in option]
    words = [*options, *words_of(args.words, needs_recipe=not options)]
    print(f"starts python -m verl.trainer.main_ppo {shlex.join(words)}", flush=True)
    ended = launch(words, show=lambda text: print(text, flush=True))
    if ended.run_dir is not None:
        print(*summary(ended.run_dir, ["digen", "train", *options, *args.words], ended.shell_code), sep="\n")
    return ended.shell_code


def words_of(given: Sequence[str], *, needs_recipe: bool = True) -> list[str]:
    """Words for verl's main. ValueError: there is no recipe, or it does not exist; a config of the user's own may have
    more.

    Example:
        words_of(["digen_sd3+nft", "trainer.nnodes=2"])  # ["recipe=digen_sd3+nft", "trainer.nnodes=2"]
    """
    words = list(given)
    if words and "=" not in words[0] and words[0][:1] not in ("", "-", "~", "+"):
        if needs_recipe and not any("searchpath" in word or word.startswith("--config-") for word in words):
            _check_recipes(words[0].split("+"))
        words[0] = f"recipe={words[0]}"
    if needs_recipe and not any(word.lstrip("+").startswith(("recipe=", "--config-")) for word in words):
        raise ValueError(
            f"the first word must be a recipe, got {repr(words[0]) if words else 'none'}; e.g. digen train "
            f"digen_quickstart, and {ALL_RECIPES}"
        )
    return words


def _check_recipes(names: Sequence[str]) -> None:
    """Raise ValueError for a name without a recipe; Hydra's own answer has 60 lines."""
    known = {one.name.removesuffix(".yaml") for one in files("verl_digen.recipes").iterdir()}
    for name in names:
        if name not in known:
            from verl_digen.recipe_source import recipe_hint  # imports Hydra and Ray

            raise ValueError(
                f"RECIPE must name a recipe, got {name!r}; {recipe_hint(name, sorted(known))}{ALL_RECIPES}"
            )
