# SPDX-License-Identifier: Apache-2.0
"""Keys, metrics and files that the pages name exist, every page is in the navigation, and the tables are up to date."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache

import yaml
from omegaconf import OmegaConf

from tests.docs.blocks import PAGES, ROOT
from tests.docs.configuration import MARK, METRICS, PAGE, default_of, generated, metrics_page, own_objectives
from verl_digen.algorithms.objectives import find_objective
from verl_digen.config import DigenConfig

README_BYTES = CHANGELOG_BYTES = 8192
"""Details and measurements belong into docs/."""
SECTIONS_OF_CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
DIGEN = re.compile(r"`\+?(digen\.[a-z_]+(?:\.\w+)*)")
VERLS = re.compile(r"`\+?((?:actor_rollout_ref|data|trainer|reward)\.[a-z_0-9]+(?:\.[a-z_0-9]+)*)(?=[`=])")
METRIC = re.compile(
    r"`((?:actor|advantage|batch|bts|episodes|hacking|perf|reward_calls|reward|rollout|staleness|tag)/[\w/]+)`"
)
FILE = re.compile(r"`((?:verl_digen|tests|examples|recipes|patches)/[\w/.]+\.(?:py|yaml|sh|md|json|txt))(?:::\w+)?`")
SETUP = (ROOT / "setup.py").read_text()
OPEN = ("digen.reward.functions", "digen.reward.recipe_functions", "digen.environment.options")
"""Mappings whose keys are the user's."""


def keys_of(config: type, prefix: str) -> Iterator[str]:
    """Every key of a section and of those below it."""
    yield prefix
    for field in fields(config):
        value = default_of(field)
        yield f"{prefix}.{field.name}"
        if is_dataclass(value):
            yield from keys_of(type(value), f"{prefix}.{field.name}")


@cache
def known_keys() -> frozenset[str]:
    """Keys under `digen:`, with the settings of all losses."""
    losses = {f"digen.loss.{field.name}" for name in own_objectives() for field in fields(find_objective(name).config)}
    return frozenset(keys_of(DigenConfig, "digen")) | losses | {"digen.loss.name", "digen.loss.old_log_probs"}


def prose(page) -> Iterator[tuple[int, str]]:
    """(number, line) of the page."""
    yield from enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)


def named(page, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(PAGE:LINE, name) of what a pattern finds."""
    for number, line in prose(page):
        for match in pattern.finditer(line):
            yield f"{page.relative_to(ROOT).as_posix()}:{number}", match[1]


def is_digen_key(name: str) -> bool:
    """True for a key under `digen:`; for `digen.sampling.val_*`, which names several, too."""
    is_open = any(name.startswith(f"{key}.") for key in OPEN)
    return is_open or name in known_keys() or (name.endswith("_") and any(key.startswith(name) for key in known_keys()))


def test_a_key_of_ours_exists():
    unknown = [f"{where} {name}" for page in PAGES for where, name in named(page, DIGEN) if not is_digen_key(name)]
    assert not unknown


def test_a_key_of_verls_exists(start):
    config = start("recipe=digen_flowgrpo+disaggregated")
    with_fields = OmegaConf.to_container(config, resolve=False)

    def exists(name: str) -> bool:
        node = with_fields
        for part in name.split("."):
            if not isinstance(node, dict):
                return node is None  # a section that is empty in verl's yaml
            if part not in node:
                return not node or name.startswith(OPEN_OF_VERL)
            node = node[part]
        return True

    unknown = [f"{where} {name}" for page in PAGES for where, name in named(page, VERLS) if not exists(name)]
    assert not unknown


OPEN_OF_VERL = (
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.actor.optim.override_optimizer_config.",
    "actor_rollout_ref.model.",
    "reward.custom_reward_function.reward_kwargs",
)
"""Sections with keys that verl's yaml lacks: dataclasses read them, or a class of ours does."""


@cache
def sources() -> str:
    """All code of the package."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "verl_digen").rglob("*.py")))


def is_metric(name: str) -> bool:
    """True if the code has the name, apart from words in capitals, which stand for any, and parts that it fills in."""
    if name.startswith("reward/custom/"):
        return True  # details that a reward of the user's returns
    area, _, rest = name.partition("/")
    text = sources()
    if f"{area}/" in text and all(piece in text for piece in re.split(r"[A-Z]+", rest)):
        return True
    parts = [match.start() for match in re.finditer("[_/]", rest)]
    starts = (f"{area}/{rest[: end + 1]}{{" for end in parts)  # f"perf/mfu/{pool}"
    ends = (f'}}{rest[start:]}"' for start in parts)  # f"{policy}_distance", in f"actor/{name}"
    return any(start in text for start in starts) or (f"{area}/{{" in text and any(end in text for end in ends))


def test_a_metric_exists():
    unknown = [f"{where} {name}" for page in PAGES for where, name in named(page, METRIC) if not is_metric(name)]
    assert not unknown


def test_a_file_exists():
    pages = [page for page in PAGES if page.name != "extending.md"]
    unknown = [f"{where} {name}" for page in pages for where, name in named(page, FILE) if not (ROOT / name).exists()]
    assert not unknown


def test_the_readme_is_short_and_says_how_to_test():
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= README_BYTES, "details belong in docs/"
    assert b"make test" in text and b"docs/algorithms/README.md" in text


def test_links_of_the_readme_lead_to_files():
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(((?!https?:)[^)#]+)", (ROOT / page).read_text())
        assert links and not [link for link in links if not (ROOT / link).exists()]


PAGE_BYTES, DOCS_BYTES = 12_000, 233_000
"""A page, apart from the generated one, and all pages."""


def test_every_page_is_in_the_navigation_and_short():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(item) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for below in item.values() if isinstance(item, dict) else item:
                yield from pages(below)

    found = {path.relative_to(ROOT / "docs").as_posix(): path.stat().st_size for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(site["nav"])) == sorted(found)
    assert [name for name, size in found.items() if size > PAGE_BYTES] == [PAGE.name]
    assert sum(found.values()) <= DOCS_BYTES, "take away what a reader does not need"
    assert site.get("repo_url") == re.search(r'(?m)^HOME: str \| None = (?:"(.*)"|None)$', SETUP)[1]  # type: ignore[index]


def test_the_page_of_the_configuration_is_what_the_dataclasses_say():
    _, mark, below = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark and below.strip() == generated().strip(), "run: python -m tests.docs.configuration --write"
    assert METRICS.read_text(encoding="utf-8") == metrics_page(), "run: python -m tests.docs.configuration --write"


def test_every_file_that_the_walk_through_the_house_names_is_there():
    """A bare name is a file beside the one that is named before it in the line."""
    missing, num_named = [], 0
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        beside = ROOT / "verl_digen" / "trainer"
        for name in re.findall(r"`([\w/]+(?:\.py|\.md|\.toml|/))`", line):
            num_named += 1
            found = next(
                (place / name for place in (ROOT, ROOT / "verl_digen", beside) if (place / name).exists()), None
            )
            if found is None:
                missing.append(name)
            else:
                beside = found.parent
    assert num_named > 40
    assert missing == []


def test_the_changelog_has_the_form_of_keep_a_changelog_and_is_short():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= CHANGELOG_BYTES
    title, first, *releases = re.split(r"(?m)^(?=## )", text)
    assert title.startswith("# Changelog\n") and "keepachangelog.com" in title
    assert first.startswith("## [Unreleased]\n")
    for release in releases:
        assert re.match(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d\n", release), release.splitlines()[0]
    for section in (first, *releases):
        kinds = re.findall(r"(?m)^### (.*)$", section)
        assert kinds == [one for one in SECTIONS_OF_CHANGES if one in kinds]
