"""The contract test of components: each is a frozen value that its table rebuilds, with documented settings."""

from __future__ import annotations

import functools
import inspect
import json
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from piebald.contracts.component import Component, build
from piebald.core.errors import PiebaldError, SettingError, shown
from piebald.core.references import USERS

Check = TypeVar("Check", bound=Callable[..., None])


def promises(kind: type, what: str) -> Callable[[Check], Check]:
    """A check that says in words that it was given something else, and what fails inside of a component.

    Args:
        kind: the base class of what it checks.
        what: what it checks, for messages, e.g. ``"an aggregator"``.
    """

    def decorate(check: Check) -> Check:
        first = next(iter(inspect.signature(check).parameters))

        @functools.wraps(check)
        def checked(*arguments: Any, **named: Any) -> None:
            value = arguments[0] if arguments else named.get(first)
            if not isinstance(value, kind):
                advice = ": make one of it first" if isinstance(value, type) and issubclass(value, kind) else ""
                raise AssertionError(f"{what} must be an instance of {kind.__name__}, got {shown(value)}{advice}")
            try:
                check(*arguments, **named)
            except (AssertionError, PiebaldError):
                raise
            except Exception as error:
                raise AssertionError(f"{what}, {type(value).__name__}: {_failure(error)}") from error

        return cast(Check, checked)

    return decorate


def _failure(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError):
        return f"it has no method {place.name!r}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''} (in {place.name})"


@promises(Component, "a component")
def check_component(component: Component) -> None:
    """Check that a component is a value: frozen, rebuilt from its table, with a documented meaning of each setting.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.training import Sgd
        >>> check_component(Sgd(lr=0.1))
    """
    subject = f"{component.axis} {component.kind!r}"
    table = component.table()
    try:
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(
            f"{subject}: its settings must be plain values, numbers, text, lists and tables: {error}"
        ) from None
    rebuilt = build(component.axis, USERS.mark(json.loads(text)))
    assert rebuilt == component, f"{subject}: its table {text} builds another component, {rebuilt!r}"
    try:
        type(component)(**{**component.model_dump(), "no_such_setting": 1})
    except SettingError:
        pass
    else:
        raise AssertionError(f"{subject}: it takes settings that it does not have: do not change model_config")
    names = type(component).model_fields
    if names:
        field = next(iter(names))
        try:
            setattr(component, field, getattr(component, field))
        except ValueError:  # pydantic's, for frozen values
            pass
        else:
            raise AssertionError(f"{subject}: it can be changed: do not change model_config")
    assert vars(type(component)).get("__doc__"), f"{subject}: the class needs a docstring that says what it does"
    documented = "\n".join(
        inspect.getdoc(base) or "" for base in type(component).__mro__ if issubclass(base, Component)
    )
    for name in names:
        assert f"{name}:" in documented or f"{name}," in documented, (
            f"{subject}: the docstring does not say what {name} means"
        )
