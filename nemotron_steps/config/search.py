"""Where a step's config files are: its pack's `configs/`, its own `config/` folder, a file the user names.

A config has a Hydra name, `<step id>/<name>`, and the folders it may come from are mounts: a prefix of config names
and the folder that holds them. Nothing is read here but folder listings.
"""

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemotron_steps.config.names import meant
from nemotron_steps.errors import ConfigError, did_you_mean

DEFAULT_CONFIG = "default"


@dataclass(frozen=True)
class Mount:
    """Configs named `prefix/...` live in `folder`. An empty prefix mounts a whole pack's `configs/`.

    With `file`, the mount is that one file, under the config name `prefix`.
    """

    prefix: str
    folder: Path
    file: Path | None = None

    def path(self, config_name: str) -> Path | None:
        """The file of that config name under this mount, whether or not it exists."""
        config_name = posixpath.normpath(config_name)
        if self.file is not None:
            return self.file if config_name == self.prefix else None
        below = self._below(config_name)
        return self.folder / f"{below}.yaml" if below else None

    def group(self, group: str) -> Path | None:
        """The folder of a config group under this mount, whether or not it exists."""
        below = self._below(group) if self.file is None else None
        return self.folder / below if below is not None else None

    def _below(self, name: str) -> str | None:
        if not self.prefix or name == self.prefix:
            return "" if self.prefix else name
        head, _, tail = name.partition(f"{self.prefix}/")
        return tail if not head and tail else None


@dataclass(frozen=True)
class SearchPath:
    """Every place one step's configs and their bases are looked for, in order.

    Attributes:
        step: step id; its configs are named `<step id>/<name>`.
        roots: the `configs/` folders of packs, the step's own pack first.
        beside: the `config/` folder beside the step's manifest, as in the public layout.
        rivals: the roots of packs with another step of this id. Bases may come from them, this step's configs not.
    """

    step: str
    roots: tuple[Path, ...] = ()
    beside: Path | None = None
    rivals: frozenset[Path] = frozenset()

    def mounts(self) -> tuple[Mount, ...]:
        """Mounts in order of precedence."""
        own = (Mount(self.step, self.beside),) if self.beside is not None else ()
        return (*own, *(Mount("", root) for root in self.roots))

    def _own(self) -> list[Mount]:
        """The mounts that may hold configs of this step."""
        return [mount for mount in self.mounts() if mount.prefix or mount.folder not in self.rivals]

    def names(self) -> tuple[str, ...]:
        """The config names this step has, sorted."""
        folders = [mount.group(self.step) for mount in self._own()]
        return tuple(sorted({file.stem for folder in folders if folder for file in folder.glob("*.yaml")}))

    def locate(self, config: str | None) -> tuple[str | None, tuple[Mount, ...]]:
        """The Hydra name of a config and the mounts to compose it from: of a name (`tiny`), a path (`./mine.yaml`), or
        None for `default`, which a step may lack: then the name is None. ConfigError with the nearest names where there
        is no such file or config."""
        names, hints = self.names(), (f"steps show {self.step}   # its configs",)
        if config is not None and is_path(config):
            file = Path(config).expanduser().absolute()
            if file.is_file():
                # A name of its own, so that a file called tiny.yaml can build on the step's tiny; the files beside it
                # come after the step's configs.
                name = f"{self.step}/{file.stem}.file"
                return name, (Mount(name, file.parent, file), *self.mounts(), Mount(self.step, file.parent))
            there = {path.stem: path for path in file.parent.glob("*.y*ml")}
            raise ConfigError(
                f"config file '{config}' does not exist",
                where=f"-c {config}",
                expected=f"a yaml file, or one of: {', '.join(names) or 'this step has no named configs'}",
                hints=did_you_mean([str(there[other]) for other in meant(file.stem, there)[:1]]) or hints,
            )
        name = config or DEFAULT_CONFIG
        if first_file(self._own(), f"{self.step}/{name}") is not None:
            return f"{self.step}/{name}", self.mounts()
        if config is None or (config == DEFAULT_CONFIG and not names):
            return None, self.mounts()
        raise ConfigError(
            f"step '{self.step}' has no config '{name}'",
            where=f"-c {name}",
            expected=", ".join(names) or "a path to a yaml file: this step has no named configs",
            found=name,
            hints=tuple(f"-c {other}" for other in meant(name, names)) or hints,
        )


def first_file(mounts: Iterable[Mount], name: str) -> Path | None:
    """The file of a config name: of the first mount that has it."""
    paths = (mount.path(name) for mount in mounts)
    return next((path for path in paths if path is not None and path.is_file()), None)


def is_path(config: str) -> bool:
    """Whether a config is named by the path of its file rather than by name."""
    return config.endswith((".yaml", ".yml")) or config.startswith((".", "/", "~"))
