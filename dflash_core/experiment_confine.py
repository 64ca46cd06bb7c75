"""Where the parameters of a deployment may point: into the workspace, the checkout, and the folders that were allowed.

Whoever starts a run at the command line can read the files anyway. Whoever fills in a form reads them through the machine
that serves it: then paths, with symbolic links followed, must lie inside, and addresses must have been allowed.

    DFLASH_ALLOWED_PATHS=/data/chats:/models               more folders
    DFLASH_ALLOWED_URLS="s3://our-bucket/chats https://llm.example.org/v1"   addresses that URLs may begin with
    DFLASH_ALLOWED_KEY_VARIABLES=OUR_SERVER_KEY             more variables whose value may be sent to a server as its key

The server may be any port of this machine, also one that somebody else listens on. So the key that is sent there is that of
such a server (`DFLASH_..._KEY`, `VLLM_API_KEY`) and not whatever this process's environment holds.

The check is made when a run starts. It holds against what a parameter says, not against somebody who can put symbolic links
into an allowed folder while the run goes on.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.data.regenerate_client import is_loopback
from dflash_core.errors import ConfigError
from dflash_core.experiment_data import workspace
from dflash_core.experiment_file import ExperimentConfig

ALLOWED_PATHS, ALLOWED_URLS, ALLOWED_KEYS = "DFLASH_ALLOWED_PATHS", "DFLASH_ALLOWED_URLS", "DFLASH_ALLOWED_KEY_VARIABLES"
# Every key that names a place; tests/test_security_confine.py looks for keys that are missing here.
FILES = ("data.files", "data.held_out", "regenerate.files")
FOLDERS = ("target.path", "draft.init_from")
SERVERS = ("regenerate.base_url",)
KEYS = ("regenerate.api_key_env",)
# Not OPENAI_API_KEY: it is worth something elsewhere. With vLLM's variable a server on this machine is started.
OWN_KEY = re.compile(r"DFLASH_([A-Z0-9]+_)*KEY|VLLM_API_KEY")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PACKAGE = re.compile(r"package:[A-Za-z0-9_]+")  # of `a.b` Python would run `a` to find `b`


@dataclass(frozen=True, slots=True)
class Confinement:
    """Folders (resolved), beginnings of URLs, and variables with keys that are allowed.

    Every method raises ConfigError, one line.
    """

    folders: tuple[Path, ...]
    urls: tuple[str, ...]
    keys: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> Confinement:
        """The workspace, the checkout if the program runs from one, and what the environment adds."""
        checkout = Path(__file__).resolve().parents[1]
        own = [workspace(), *([checkout] if (checkout / "pyproject.toml").is_file() else [])]
        more = [Path(text) for text in os.environ.get(ALLOWED_PATHS, "").split(os.pathsep) if text]
        if relative := [str(path) for path in more if not path.is_absolute()]:
            raise ConfigError(f"{ALLOWED_PATHS}: {relative[0]} is not an absolute path")
        keys = [name for text in os.environ.get(ALLOWED_KEYS, "").split(",") if (name := text.strip())]
        if wrong := [name for name in keys if not VARIABLE.fullmatch(name)]:
            raise ConfigError(f"{ALLOWED_KEYS}: {wrong[0]!r} is not the name of a variable; names stand between commas")
        folders = tuple(path.resolve() for path in [*own, *more])
        return cls(folders, tuple(os.environ.get(ALLOWED_URLS, "").split()), tuple(keys))

    def check(self, config: ExperimentConfig) -> None:
        """Check every path and address of an experiment and of its runs."""
        for one in [config, *(variant for _, variant in config.variants())]:
            for key in FILES:
                for pattern in _texts(one, key):
                    self.check_files(key, pattern)
            for key in FOLDERS:
                for text in _texts(one, key):
                    self.check_folder(key, text)
            for key in SERVERS:
                for url in _texts(one, key):
                    if not is_loopback(url):
                        self.check_url(key, url)
            for key in KEYS:
                for name in _texts(one, key):
                    self.check_key(key, name)

    def check_key(self, key: str, name: str) -> None:
        """Refuse a variable, or the Secret block called by it, that is not there to be sent to a server."""
        if name not in self.keys and not OWN_KEY.fullmatch(name):
            raise ConfigError(
                f"{key}: {_shown(name)}: not allowed here, only DFLASH_..._KEY and VLLM_API_KEY are; {ALLOWED_KEYS} allows others"
            )

    def check_url(self, key: str, url: str) -> None:
        """Refuse an address that was not allowed."""
        if not self._is_allowed(url):
            raise ConfigError(f"{key}: {_shown(url)}: not on this machine; {ALLOWED_URLS} allows others")

    def check_path(self, key: str, text: str) -> None:
        """Refuse a path that leads outside, itself or through symbolic links; it need not exist."""
        if _is_url(text):
            if not self._is_allowed(text):
                raise ConfigError(f"{key}: {_shown(text)}: URLs are not allowed here; {ALLOWED_URLS} allows some")
            return
        try:
            found = Path(text).resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links; a NUL
            raise ConfigError(f"{key}: {text!r}: not a usable path") from None
        if not any(found.is_relative_to(folder) for folder in self.folders):
            inside = ", ".join(map(str, self.folders))
            raise ConfigError(
                f"{key}: {_shown(text)}: leads outside the folders allowed here ({inside}); {ALLOWED_PATHS} adds some"
            )

    def check_files(self, key: str, pattern: str) -> None:
        """`check_path` for a path or a glob: where it begins, and every match."""
        if _is_url(pattern) or not glob.has_magic(pattern):
            self.check_path(key, pattern)
            return
        parts = Path(pattern).parts
        if ".." in parts:
            raise ConfigError(f"{key}: {_shown(pattern)}: a pattern with '..' is not allowed here")
        self.check_path(key, pattern)  # a file may be called like that, and then it is the one that is read
        fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        self.check_path(key, str(Path(*parts[:fixed])))
        for match in glob.iglob(pattern, recursive=True):  # noqa: PTH207 - as the files are looked for when they are read
            self.check_path(key, match)

    def check_folder(self, key: str, text: str) -> None:
        """`check_path` for a model's folder and the files in it; `package:NAME` is no path."""
        if PACKAGE.fullmatch(text):
            return
        if text.startswith("package:"):  # which is no path, whatever follows
            raise ConfigError(f"{key}: {_shown(text)}: not the name of a package")
        self.check_path(key, text)
        if Path(text).is_dir():
            for entry in sorted(Path(text).iterdir()):
                self.check_path(key, str(entry))

    def _is_allowed(self, url: str) -> bool:
        plain = "::" not in url and ".." not in url and "%" not in url and "\\" not in url
        return plain and any(url == start or url.startswith(f"{start.rstrip('/')}/") for start in self.urls)


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)  # one line, whatever a form sent


def _is_url(text: str) -> bool:
    return "://" in text or "::" in text


def _texts(config: ExperimentConfig, dotted: str) -> Iterator[str]:
    """The text or texts of a key, none where it is not set."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name, None)
    values: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    yield from (text for text in values if isinstance(text, str))
