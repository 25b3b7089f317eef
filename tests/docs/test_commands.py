# SPDX-License-Identifier: Apache-2.0
"""Every command of README.md, CONTRIBUTING.md and docs/ is composed, parsed or compiled, in this process.

- `python -m verl.trainer.main_ppo WORDS`, and lines of KEY=VALUE: Hydra composes them, and the checks of a start pass
  that need no prompts and no weights.
- `digen SUBCOMMAND`: the command's own parser; the words of `digen plan` and `digen bench` are composed, too.
- other programs of the repository: the file exists and knows every option.
- `make`, `pip`, `uv`: targets and extras exist.
- `docker`, `sbatch`, `kubectl`: files and build arguments exist; words for a script compose.
- what is left needs a marker with a reason, see `tests.docs.blocks`.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from tests import own_parts
from tests.docs.blocks import BLOCKS, LANGUAGES, PAGES, ROOT, Block, indented_lines
from verl_digen.cli import make_parser
from verl_digen.config import digen_config
from verl_digen.preflight.adapter import check_teacher
from verl_digen.preflight.inputs import check_pairs, check_prompts
from verl_digen.preflight.rewards import check_reward_model
from verl_digen.preflight.rules import CHECKPOINT, MACHINE, REWARDS, RULES, check
from verl_digen.reward.named import has_custom
from verl_digen.tools.plan.compose import Words, compose_run, platform_of, split_words
from verl_digen.tools.train.train_command import words_of

MAIN = ["python", "-m", "verl.trainer.main_ppo"]
SHOW = ("--cfg", "job")
"""Words for Hydra that are no overrides."""
SMALL = ("digen_quickstart", "digen_tiny_ocr", "digen_tiny_edit", "digen_edit_episodes")
"""Recipes for any machine; all others are composed for accelerators."""
OF_FILES = {check_prompts, check_pairs, check_teacher, check_reward_model}
"""Checks of files and packages that a reader of the docs has and this machine lacks."""
EXTRAS = {
    *re.findall(r'^        "([\w-]+)": ', (ROOT / "setup.py").read_text().partition("extras_require=")[2], re.MULTILINE)
}
MAKEFILE = (ROOT / "Makefile").read_text()
SHELL = [block for block in BLOCKS if block.language == "bash"]
CHECKED = [block for block in SHELL if block.reason is None]


def check_config(config: DictConfig) -> None:
    """Run the checks of a start that need no files."""
    has_rewards = digen_config(config).reward.entries or has_custom(config)
    left_out = {CHECKPOINT, MACHINE} | (set() if has_rewards else {REWARDS})
    check(config, [rule for rule, kind in RULES.items() if kind not in left_out and rule not in OF_FILES])


def composed(start, words: list[str]) -> DictConfig:
    """The config of these words, on accelerators unless a recipe is for any machine."""
    is_small = any(recipe in word for word in words for recipe in SMALL if word.startswith("recipe="))
    with platform_of(Words() if is_small else Words(gpus=8)):
        config = start(*words)
        check_config(config)
    return config


def options_of(source: Path) -> set[str]:
    """Options that a program's parser declares."""
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {word.value for call in added for word in call.args if isinstance(word, ast.Constant)}


def check_program(source: Path, words: list[str]) -> None:
    """Require that a program of the repository exists and knows the options."""
    assert source.is_file(), f"{source} does not exist"
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= options_of(source), f"{source.name} has no {sorted(used - options_of(source))}"


def check_python(start, block: Block, words: list[str]) -> None:
    """Check `python ...`."""
    if words[:3] == MAIN:
        composed(start, [word for word in words[3:] if word not in SHOW])
    elif words[1] == "-m" and words[2] == "pytest":
        check_pytest(start, block, words[2:])
    elif words[1] == "-m":
        module = ROOT / words[2].replace(".", "/")
        check_program(module / "__main__.py" if module.is_dir() else module.with_suffix(".py"), words[3:])
    else:
        inner = next((number for number, word in enumerate(words[2:], 2) if word in PROGRAMS), len(words))
        check_program(ROOT / words[1], words[2:inner])
        if inner < len(words):  # a command that the program runs
            check_command(start, block, words[inner:])


def check_digen(start, block: Block, words: list[str]) -> None:
    """Check `digen ...`."""
    args = make_parser().parse_args(words[1:])
    if args.command == "plan":
        own, overrides = split_words(args.words)
        with platform_of(own):
            check_config(compose_run(overrides, own))
    elif args.command == "train" and args.config_name is None:
        composed(start, words_of(args.words))
    elif args.command == "bench" and args.overrides:
        composed(start, [f"recipe={args.recipe or 'digen_quickstart'}", *args.overrides])


def check_make(start, block: Block, words: list[str]) -> None:
    """Check `make TARGET NAME=VALUE`."""
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        rule = rf"^{name} \?=" if is_variable else rf"^{re.escape(name)}:"
        assert re.search(rule, MAKEFILE, re.MULTILINE), f"the Makefile has no {name}"


def check_install(start, block: Block, words: list[str]) -> None:
    """Check `pip install` and `uv pip install`: extras of ours exist."""
    assert "install" in words or "wheel" in words or "download" in words, words
    for word in words:
        if match := re.fullmatch(r"(?:verl-digen|\.)\[([\w,-]+)\].*", word):
            assert {*match[1].split(",")} <= EXTRAS, f"setup.py has no such extra: {word}"


def check_pytest(start, block: Block, words: list[str]) -> None:
    """Check `pytest PATHS`."""
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths), paths


def check_docker(start, block: Block, words: list[str]) -> None:
    """Check `docker build` and `kubectl apply`: files and build arguments exist."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    files = [after for word, after in pairwise(words) if word in ("-f", "--file")]
    assert files and all((ROOT / name).is_file() for name in files), files
    arguments = [after.partition("=")[0] for word, after in pairwise(words) if word == "--build-arg"]
    assert all(re.search(rf"^ARG {name}=", dockerfile, re.MULTILINE) for name in arguments), arguments


def check_sbatch(start, block: Block, words: list[str]) -> None:
    """Check `sbatch OPTIONS SCRIPT WORDS`: as the script's own call."""
    script = next(number for number, word in enumerate(words) if word.endswith(".sh"))
    check_command(start, block, words[script:])


PROGRAMS = {
    "python": check_python,
    "digen": check_digen,
    "make": check_make,
    "pip": check_install,
    "uv": check_install,
    "pytest": check_pytest,
    "docker": check_docker,
    "kubectl": check_docker,
    "sbatch": check_sbatch,
}


def check_command(start, block: Block, words: list[str]) -> None:
    """Check one command of a block."""
    if words[0].endswith(".sh"):
        script = ROOT / words[0]
        assert script.is_file() and script.stat().st_mode & 0o100, f"{words[0]} cannot be run"
        given = [word for word in words[1:] if "=" in word]
        recipe = re.search(r"recipe=(?:\"\$\{\w+:-)?(\w+)", script.read_text())
        if given and recipe:
            composed(start, [f"recipe={recipe[1]}", *given])
    elif words[0] in PROGRAMS:
        PROGRAMS[words[0]](start, block, words)
    else:
        assert "=" in words[0], f"no test knows {words[0]}: teach one, or give a reason above the block"
        has_recipe = any(word.startswith("recipe=") for word in words)
        base = block.on or ("" if has_recipe else "recipe=digen_quickstart")
        composed(start, [*base.split(), *words])


@pytest.fixture
def beside(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the working directory one with the python files that the block's page shows, e.g. `# brightness.py`."""
    for other in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", other.text) if other.language == "python" else None
        if named and other.page == block.page:
            (tmp_path / named[1]).write_text(other.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with own_parts.forgotten(*(file.stem for file in tmp_path.glob("*.py"))):
        yield


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: block.name)
def test_a_command_of_the_docs_can_be_given(start, block: Block, beside):
    assert block.commands, f"{block.name} has no command"
    for words in block.commands:
        try:
            check_command(start, block, words)
        except SystemExit as error:
            raise AssertionError(f"{block.name}: refused by its parser: {words}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_of_a_page_is_fenced_and_names_its_language(page: Path):
    assert not [*indented_lines(page)], "put ``` with a language around it"
    here = [block for block in BLOCKS if block.page == page.relative_to(ROOT).as_posix()]
    strange = [f"{block.name} {block.language}" for block in here if block.language not in LANGUAGES]
    assert not strange, f"languages are {', '.join(LANGUAGES)}"


def test_shell_of_the_docs_is_what_bash_can_read(tmp_path: Path):
    script = "\n".join(f": {block.name}\n{block.text}" for block in SHELL)
    (tmp_path / "all.sh").write_text(script)
    read = subprocess.run(["bash", "-n", tmp_path / "all.sh"], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr


def test_python_json_and_yaml_of_the_docs_can_be_read():
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        elif block.language == "json":
            for line in block.text.splitlines():
                json.loads(line)
        elif block.language == "yaml":
            assert [*yaml.safe_load_all(block.text)], block.name


def test_reasons_for_not_checking_are_few_and_say_why():
    reasons = [block.reason for block in SHELL if block.reason is not None]
    assert all(len(reason.split()) >= 3 for reason in reasons)
    assert len(reasons) < len(SHELL) / 5, "most commands are checked"
