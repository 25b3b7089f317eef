# SPDX-License-Identifier: Apache-2.0
"""Names of datasets of the Hugging Face hub, and loading what the `datasets` library reads.

Downloads are kept in the library's cache, and its variables hold (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

SCHEME = "hf://"
FORM = f"{SCHEME}OWNER/NAME[@REVISION][/CONFIG][:SPLIT]"
PATTERN = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?"
    r"(?::(?P<split>\S+))?"
)


@dataclass(frozen=True)
class HubName:
    """A dataset of the hub.

    Example:
        HubName.parse("hf://me/words/en:train[:100]", key)  # HubName("me/words", None, "en", "train[:100]")
    """

    name: str
    """OWNER/NAME."""
    revision: str | None
    """A branch, tag or commit; None is the newest."""
    config: str | None
    """The subset; None is the only or the default one."""
    split: str | None
    """A split or a slice of one, in the library's notation."""

    @staticmethod
    def parse(text: str, key: str) -> HubName:
        """Read `FORM`; "datasets/" in front of the owner, as in the hub's own addresses, may be left out.

        Raises:
            ValueError: another form.
        """
        match = PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{key} must name a dataset of the hub by {FORM}, got {text!r}; write e.g. {key}=hf://owner/name:train"
            )
        return HubName(**match.groupdict())

    def with_split(self, default: str) -> HubName:
        """A copy with the split `default` where it has none."""
        return self if self.split else replace(self, split=default)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"/{self.config}" if self.config else ""
        return f"{SCHEME}{self.name}{revision}{config}" + (f":{self.split}" if self.split else "")

    def load(self) -> Any:
        """The dataset, downloaded if it is not in the cache. The library's errors pass."""
        import datasets  # 1 s, and users of files do not need it

        return datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)


def load_saved(folder: str) -> Any:
    """The dataset that `Dataset.save_to_disk` wrote. The library's errors pass."""
    import datasets  # 1 s, and users of files do not need it

    return datasets.load_from_disk(folder)
