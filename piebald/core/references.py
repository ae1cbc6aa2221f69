"""Names of code in settings: text like "module:name" is found with the rights of whoever wrote it, else by nobody.

Text is data.  It becomes a `Reference` where it enters, by the resolver of its author, and only a `Reference` is ever
looked up; what nobody has marked, names nothing.  There are two resolvers:

- `Users` for what the user of this machine wrote: an experiment file, a command, a call in Python.  Any module that is
  installed or lies in a folder of `search` may be named, and files of Python code there.
- `Outside` for what arrives: terms, tasks and questions of a server, run folders, backups, queues.  It finds classes
  and functions that are *defined* in modules which the owner of this machine lists, and nothing else: not what such a
  module has imported, nothing through a module that is an attribute, nothing private, nothing of Piebald or Python.

Registered components, recipes, models and data sets have plain names, which need no resolver.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Self

from pydantic import WrapValidator

from piebald.core.arguments import DEEPEST
from piebald.core.errors import SettingError, shown, unknown

GROUP = "piebald.components"  # of entry points

_WORDS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_folders: list[Path] = []  # where modules are searched besides Python's path


class Reference(str):
    """Text like "module:name" with the resolver of its author.  It is compared, written and sent as text alone."""

    resolver: Resolver

    def __new__(cls, text: str, resolver: Resolver) -> Self:
        reference = super().__new__(cls, text)
        reference.resolver = resolver
        return reference

    def __getnewargs__(self) -> tuple[str, Resolver]:  # type: ignore[override]
        return str(self), self.resolver

    def resolved(self, what: str) -> Any:
        """Return what it names, see `Resolver.find`."""
        return self.resolver.find(str(self), what)


Text = Annotated[str, WrapValidator(lambda value, strictly: value if isinstance(value, Reference) else strictly(value))]


def is_reference(name: object) -> bool:
    """Return whether a name has the form "module:name" or "file.py:name"."""
    return isinstance(name, str) and ":" in name


def search(folder: Path | str) -> None:
    """Find modules in this folder as well, after all others."""
    place = Path(folder).resolve()
    if place not in _folders:
        _folders.append(place)
    # at the end: a file in the folder must not take the place of an installed package
    if str(place) not in sys.path:
        sys.path.append(str(place))  # so that the modules there find one another, also in workers


def folders() -> tuple[Path, ...]:
    """The folders of `search`."""
    return tuple(_folders)


class Resolver(ABC):
    """The rights of an author of text to name modules and what is in them."""

    @abstractmethod
    def module(self, name: str) -> ModuleType:
        """Return the module, or the module in the file, of this name.

        Raises:
            SettingError: it is not allowed, does not exist, or fails.
        """

    @abstractmethod
    def attribute(self, holder: Any, name: str) -> Any:
        """Return an attribute of a module or a class, or raise KeyError where there is none that may be named."""

    @abstractmethod
    def discover(self) -> None:
        """Import what installed packages offer, where the author may have that."""

    def use(self, modules: Collection[str]) -> None:
        """Import modules, which register their components and recipes.

        Raises:
            SettingError: one of them is not allowed, does not exist, or fails.
        """
        # text is a sequence of letters, each of which would pass for the name of a module
        if isinstance(modules, str) or not all(isinstance(module, str) for module in modules):
            raise SettingError(f"plugins must be a list of modules, like ['mylab'], got {modules!r}")
        for module in modules:
            if module.endswith(".py"):
                raise SettingError(f"a plugin is named like 'mylab' or 'mylab.models', got {module!r}")
            self.module(module)

    def find(self, reference: str, what: str) -> Any:
        """Return the object that "module:name" or "file.py:name" names.

        Args:
            reference: the module, or the path of a file relative to the folders of `search`, and the name inside of it.
            what: what is named, for messages, e.g. ``"model"``.

        Raises:
            SettingError: there is no such module or name, it is not allowed, or the import fails.
        """
        module, _, name = reference.rpartition(":")
        if not module or not _WORDS.fullmatch(name):
            raise SettingError(f"{what} must be a name or 'module:name', like 'mylab:Net', got {shown(reference)}")
        target: Any = self.module(module)
        for word in name.split("."):
            try:
                # also within a dotted name: `Net.__init__.__globals__` would reach everything
                if word.startswith("_"):
                    raise KeyError(word)
                target = self.attribute(target, word)
            except KeyError:
                public = sorted(name for name in dir(target) if not name.startswith("_") and name != word)
                raise unknown(f"{what} in {module} called", word, public) from None
        return target

    def mark(self, value: Any, depth: int = 0) -> Any:
        """Return plain values with all text of the form "module:name" as references, at every depth.

        Other values, and the references of other authors, stay as they are.

        Raises:
            SettingError: lists and tables are nested too deeply.
        """
        if isinstance(value, str):
            return Reference(value, self) if is_reference(value) and not isinstance(value, Reference) else value
        if not isinstance(value, Mapping | list | tuple):
            return value
        if depth == DEEPEST:
            raise SettingError(f"lists and tables must be nested at most {DEEPEST} deep")
        if isinstance(value, Mapping):
            return {name: self.mark(inner, depth + 1) for name, inner in value.items()}
        marked = [self.mark(inner, depth + 1) for inner in value]
        return tuple(marked) if isinstance(value, tuple) else marked


class Users(Resolver):
    """The rights of the user of this machine: all that can be imported here, but Python's own modules."""

    _discovered = False

    def module(self, name: str) -> ModuleType:
        """See `Resolver`."""
        return _module_of_file(name) if name.endswith(".py") else _imported(name)

    def attribute(self, holder: Any, name: str) -> Any:
        """See `Resolver`."""
        # `vars` would miss what a package imports only when it is asked for
        if isinstance(holder, ModuleType) and name in dir(holder):  # some import when asked
            return getattr(holder, name)
        return vars(holder)[name]

    def discover(self) -> None:
        """Import the modules that installed packages offer in the group "piebald.components", once."""
        if not Users._discovered:
            Users._discovered = True
            self.use([entry.module for entry in metadata.entry_points(group=GROUP)])


class Outside(Resolver):
    """The rights of others: what is defined in modules that the owner of this machine lists.

    Args:
        modules: the modules; those inside of them are listed with them.  For a folder, files of Python code as well.
        advice: what the owner does to list another one, for messages.
        folder: a folder that came with the text, from which nothing is imported, whatever Python's path is.
    """

    def __init__(self, modules: Collection[str], advice: str, folder: Path | None = None) -> None:
        names = [str(module).removesuffix(".py") for module in modules]
        if isinstance(modules, str) or not all(_WORDS.fullmatch(word) for name in names for word in name.split("/")):
            raise SettingError(f"plugins must be a list of modules, like ['mylab'], got {modules!r}")
        self.modules = (*names, *(name.rpartition("/")[2] for name in names if "/" in name))
        self.advice, self.folder = advice, folder

    def lists(self, module: object) -> bool:
        """Return whether a module is listed, or inside of one that is, and neither Piebald's nor Python's."""
        if not isinstance(module, str) or _top(module) == "piebald" or _top(module) in sys.stdlib_module_names:
            return False
        return any(module == listed or module.startswith(f"{listed}.") for listed in self.modules)

    def module(self, name: str) -> ModuleType:
        """See `Resolver`."""
        if name.endswith(".py"):
            if self.folder is None:
                raise SettingError(f"{shown(name)} is a file, which nobody else has: make it a module, and name that")
            if name.removesuffix(".py") in self.modules:
                return _module_of_file(name, self.folder)
        private = any(word.startswith("_") for word in name.split(".")) and name not in self.modules
        if private or not _WORDS.fullmatch(name):
            raise SettingError(f"a plugin is named like 'mylab' or 'mylab.models', got {shown(name)}")
        if _top(name) == "piebald":
            raise SettingError(f"{name!r} is a module of Piebald itself, whose parts have names without a module")
        _refuse_standard(name)
        if not self.lists(name):
            raise SettingError(f"the plugin {shown(name)} is not allowed here: {self.advice}, if you trust it")
        return _imported(name, self.folder)

    def discover(self) -> None:
        """Import nothing: what a package offers is not what the owner lists."""

    def attribute(self, holder: Any, name: str) -> Any:
        """See `Resolver`."""
        if not isinstance(holder, ModuleType | type):
            raise KeyError(name)
        # not by getattr, with which a module's `__getattr__` or a descriptor would run code
        value = vars(holder)[name]
        # whatever can be called says where it was defined: a class and a function themselves, an instance by its class
        if isinstance(value, ModuleType) or (callable(value) and not self.lists(getattr(value, "__module__", None))):
            raise SettingError(
                f"{name!r} is not defined in {getattr(holder, '__name__', holder)}, which only uses it: name the "
                "module that defines it, and list that one"
            )
        return value


USERS = Users()
NOBODY = Outside((), "its text may name no module")


def of_folder(folder: Path | str, modules: Collection[str]) -> Outside:
    """Return the rights of whoever wrote a run folder: no more than the user allows, and no file in it is imported."""
    return Outside(modules, "allow it with --plugin, or plugins=[...] in Python", Path(folder))


# -------------------------------------------------------------------------------------------------------------- helpers


def _top(module: str) -> str:
    return module.partition(".")[0]


def _refuse_standard(module: str) -> None:
    # or a setting could name os.system, and call whatever else the standard library can do
    if _top(module) in sys.stdlib_module_names:
        raise SettingError(f"{module!r} is a module of Python itself, not a plugin")


def _imported(module: str, folder: Path | None = None) -> ModuleType:
    """Import a module, unless it lies in a folder that came with its name."""
    if not _WORDS.fullmatch(module):
        raise SettingError(f"a plugin is named like 'mylab' or 'mylab.models', got {shown(module)}")
    _refuse_standard(module)
    # it has run already, wherever it lies, and looking into it imports nothing
    if (before := sys.modules.get(module)) is not None:
        return before
    try:
        spec = importlib.util.find_spec(_top(module))
        # an attacker's folder may be Python's working directory, and so on its path
        if spec is not None and any(_lies_in(place, folder) for place in (spec.origin, *_places(spec))):
            raise ModuleNotFoundError(name=module)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise SettingError(
                f"there is no module {module!r}: install its package, or start in the folder that holds {module}.py"
            ) from None
        raise failed(module, "cannot be imported", error) from None
    except (Exception, SystemExit) as error:
        # SystemExit as well: a script without a guard may end itself when it is imported
        raise failed(module, "cannot be imported", error) from error


def _places(spec: ModuleSpec) -> Sequence[str]:
    return list(spec.submodule_search_locations or ())


def _lies_in(place: Path | str | None, folder: Path | None) -> bool:
    return place is not None and folder is not None and folder.resolve() in Path(place).resolve().parents


def _module_of_file(path: str, folder: Path | None = None) -> ModuleType:
    """Return the module in a file, under the name of the file, unless it lies in a folder that came with its name."""
    name = Path(path).stem
    if Path(path).is_absolute() or ".." in Path(path).parts or not _WORDS.fullmatch(name):
        raise SettingError(
            f"a file of Python code is named from the folder that holds it, like my_data.py, got {path!r}"
        )
    files = [place / path for place in _folders if (place / path).is_file()]
    file = next((file for file in files if not _lies_in(file, folder)), None)
    if file is None:
        raise SettingError(f"there is no file {path}: start in the folder that holds it")
    before = sys.modules.get(name)
    if before is not None:
        if before.__spec__ is not None and before.__spec__.origin == str(file):
            return before
        raise SettingError(f"{path} has the name of a module that is in use already: rename it")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    # before it runs, so that what is defined there can be looked up while it is being defined
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        # half a module must not be taken for the whole one at the next try
        del sys.modules[name]
        raise failed(path, "cannot be imported", error) from error
    return loaded


def failed(name: str, how: str, error: BaseException) -> SettingError:
    """Return the error of somebody's code as one sentence."""
    if isinstance(error, SettingError):
        return error
    text = " ".join(str(error).split())
    return SettingError(f"{name} {how}: {type(error).__name__}{f': {text}' if text else ''}")
