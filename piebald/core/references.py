"""Names of code in settings: text like "module:name" is found with the rights of whoever wrote it, else by nobody.

Text is data.  It becomes a `Reference` where it enters, by the resolver of its author, and only a `Reference` is ever
looked up; what nobody has marked, names nothing.  There are two resolvers:

- `Users` for what the user of this machine wrote: an experiment file, a command, a call in Python.  Any module that is
  installed may be named, and any file of Python code by its path.
- `Outside` for what arrives: terms, tasks and questions of a server, run folders, backups, queues.  It finds classes
  and functions that are *defined* in modules which the owner of this machine lists, and nothing else: not what such a
  module has imported, nothing through a module that is an attribute, nothing private, nothing of Piebald or Python.

Registered components, recipes, models and data sets have plain names, which need no resolver.

No folder is searched for modules, neither the current one nor that of an experiment: a module that is not installed is
listed by the path of its file, like "lab/mylab.py", and what lies beside that file is not found.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Self

from pydantic import WrapValidator

from piebald.core.arguments import DEEPEST
from piebald.core.errors import SettingError, shown, unknown

GROUP = "piebald.components"  # of entry points

_WORDS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_files: dict[str, Path] = {}  # by the name of the module, those that were listed by their path


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


class _ListedFiles(MetaPathFinder):
    """Finds the modules in `_files`, and the modules inside of a package among them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """See `MetaPathFinder`."""
        file = _files.get(fullname)
        if file is None or path is not None:
            return None
        inside = [str(file.parent)] if file.stem == "__init__" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=inside)


sys.meta_path.append(_ListedFiles())  # after all others: a file must not take the place of an installed package


def list_file(path: str | Path, folder: Path | None = None) -> str:
    """Let a module be imported from its file, and return the name of the module; nothing runs yet.

    Args:
        path: of the file, or of the `__init__.py` of a package.
        folder: what the path is relative to, by default the current folder.

    Raises:
        SettingError: there is no such file, or its name is that of another module.
    """
    file, name = Path(folder or Path.cwd(), path), module_name(str(path))
    if not _WORDS.fullmatch(name) or "." in name:
        raise SettingError(f"a file of Python code is named like my_data.py, got {shown(str(path))}")
    _refuse_standard(name)
    if not file.is_file():
        if name in _files:  # settings of another folder, whose file has been listed here
            return name
        raise SettingError(
            f"there is no file {path}: give its path from the folder of the experiment file, or in a command from the "
            "current folder"
        )
    other = _files.get(name) or module_file(name)
    if other is not None and Path(other).resolve() != file.resolve():
        raise SettingError(f"{path} has the name of a module that is in use already: rename it")
    _files[name] = file.resolve()
    return name


def module_name(plugin: str) -> str:
    """Return the name of the module that a name or the path of a file stands for.

    Examples:
        >>> [module_name(plugin) for plugin in ("mylab.models", "lab/mylab.py", "mylab/__init__.py")]
        ['mylab.models', 'mylab', 'mylab']
    """
    path = Path(plugin)
    return plugin if not is_file(plugin) else path.parent.name if path.stem == "__init__" else path.stem


def is_file(plugin: str) -> bool:
    """Return whether a plugin is named by the path of its file."""
    return plugin.endswith(".py")


def files() -> tuple[Path, ...]:
    """The files of `list_file`."""
    return tuple(_files.values())


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
            raise SettingError(f"plugins must be a list of modules, like ['mylab'] or ['mylab.py'], got {modules!r}")
        for module in modules:
            (module.resolver if isinstance(module, Reference) else self).module(module)

    def find(self, reference: str, what: str) -> Any:
        """Return the object that "module:name" or "file.py:name" names.

        Args:
            reference: the module, or the path of its file, and the name inside of it.
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
        """Return plain values with all text like "module:name" and "file.py" as references, at every depth.

        Other values, and the references of other authors, stay as they are.

        Raises:
            SettingError: lists and tables are nested too deeply.
        """
        if isinstance(value, str):
            names_code = is_reference(value) or is_file(value)
            return Reference(value, self) if names_code and not isinstance(value, Reference) else value
        if not isinstance(value, Mapping | list | tuple):
            return value
        if depth == DEEPEST:
            raise SettingError(f"lists and tables must be nested at most {DEEPEST} deep")
        if isinstance(value, Mapping):
            return {name: self.mark(inner, depth + 1) for name, inner in value.items()}
        marked = [self.mark(inner, depth + 1) for inner in value]
        return tuple(marked) if isinstance(value, tuple) else marked


class Users(Resolver):
    """The rights of the user of this machine: all that can be imported here, but Python's own modules.

    Args:
        folder: what paths of files are relative to, by default the current folder.
    """

    _discovered = False

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def module(self, name: str) -> ModuleType:
        """See `Resolver`."""
        return _imported(list_file(name, self.folder) if is_file(name) else name)

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
        modules: the modules, or the paths of their files; modules inside of them are listed with them.
        advice: what the owner does to list another one, for messages.
        folder: a folder that came with the text, from which nothing is imported, whatever Python's path is.
        paths_from: what paths of files are relative to, by default the current folder.
    """

    def __init__(
        self, modules: Collection[str], advice: str, folder: Path | None = None, paths_from: Path | None = None
    ) -> None:
        if isinstance(modules, str) or not all(is_file(module) or _WORDS.fullmatch(module) for module in modules):
            raise SettingError(f"plugins must be a list of modules, like ['mylab'] or ['mylab.py'], got {modules!r}")
        self._of_files = {list_file(module, paths_from) for module in modules if is_file(module)}
        self.modules = tuple(module_name(module) for module in modules)
        self.advice, self.folder = advice, folder

    def lists(self, module: object) -> bool:
        """Return whether a module is listed, or inside of one that is, and neither Piebald's nor Python's."""
        if not isinstance(module, str) or _top(module) == "piebald" or _top(module) in sys.stdlib_module_names:
            return False
        return any(module == listed or module.startswith(f"{listed}.") for listed in self.modules)

    def module(self, name: str) -> ModuleType:
        """See `Resolver`."""
        module = module_name(name)
        if is_file(name) and self.folder is None and module not in self._of_files:
            raise SettingError(f"{shown(name)} is a file, which nobody else has: make it a module, and name that")
        private = any(word.startswith("_") for word in module.split(".")) and module not in self.modules
        if private or not _WORDS.fullmatch(module):
            raise SettingError(f"a plugin is named like 'mylab' or 'mylab.models', got {shown(name)}")
        if _top(module) == "piebald":
            raise SettingError(f"{name!r} is a module of Piebald itself, whose parts have names without a module")
        _refuse_standard(module)
        if not self.lists(module):
            raise SettingError(f"the plugin {shown(name)} is not allowed here: {self.advice}, if you trust it")
        return _imported(module, self.folder)

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
                f"there is no module {module!r}: install its package, or name its file, like 'lab/{module}.py'"
            ) from None
        raise failed(module, "cannot be imported", error) from None
    except (Exception, SystemExit) as error:
        # SystemExit as well: a script without a guard may end itself when it is imported
        raise failed(module, "cannot be imported", error) from error


def _places(spec: ModuleSpec) -> Sequence[str]:
    return list(spec.submodule_search_locations or ())


def _lies_in(place: Path | str | None, folder: Path | None) -> bool:
    return place is not None and folder is not None and folder.resolve() in Path(place).resolve().parents


def module_file(module: str) -> str | None:
    """Return the file of a module that is installed or imported already; nothing is imported."""
    before = sys.modules.get(module)
    spec = importlib.util.find_spec(module) if before is None else before.__spec__
    return None if spec is None else spec.origin


def failed(name: str, how: str, error: BaseException) -> SettingError:
    """Return the error of somebody's code as one sentence."""
    if isinstance(error, SettingError):
        return error
    text = " ".join(str(error).split())
    return SettingError(f"{name} {how}: {type(error).__name__}{f': {text}' if text else ''}")
