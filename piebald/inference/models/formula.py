"""Formulas as in R and statsmodels, of which no part is evaluated: they become columns that a plan names.

formulaic reads the algebra of terms and finds which categories a model needs.  What stands between the operators is
read as a tree of syntax, in which a closed list of functions and operations is allowed, and becomes the steps of
`Computed`: to a site goes a plan, never a formula.  What a function takes from the rows (knots, means, categories) is
of the rows of all clients, and stands in the plan as numbers.  A computed column comes to a site as data: its steps are
names of columns, numbers and operations of that list, and nothing in them is run as code.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from piebald.core.errors import SettingError, import_extra, shown
from piebald.core.moments import Floats

Name = Annotated[str, Field(max_length=300)]
Term = tuple[Name, Name | None]  # a column of numbers, or a column and the category that counts as 1
CLIENT: Final = ""  # the column that has the name of the client, where a term's category is one
Operation = Literal["add", "subtract", "multiply", "divide", "power", "log", "exp", "sqrt", "abs"]
Number = Annotated[float, Field(allow_inf_nan=False)]
MOST_STEPS = 64
_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power,
}  # fmt: skip
_UNARY: dict[Any, Callable[[Any], Any]] = {"log": np.log, "exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
_LARGEST_POWER = 10.0


class Spline(BaseModel):
    """One function of a basis of B-splines; a number beyond the outer knots counts as the nearer one.

    Attributes:
        degree: of its polynomials.
        knots: of the basis, the outer ones `degree` + 1 times.
        index: of the function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    degree: int = Field(ge=0, le=5)
    knots: tuple[Number, ...] = Field(max_length=100)
    index: int = Field(ge=0)

    @model_validator(mode="after")
    def _check_knots(self) -> Self:
        inner = self.knots[self.degree : len(self.knots) - self.degree]
        if len(inner) < 2 or self.index > len(self.knots) - self.degree - 2 or list(inner) != sorted({*inner}):
            raise ValueError("knots of a spline must increase, and its index be of one of its functions")
        ends = {*self.knots[: self.degree + 1]}, {*self.knots[len(self.knots) - self.degree - 1 :]}
        if ends != ({inner[0]}, {inner[-1]}):
            raise ValueError("the outer knots of a spline come once more than its degree")
        return self

    def __call__(self, values: Floats) -> Floats:
        """Return the function of numbers [n], NaN for gaps."""
        from scipy.interpolate import BSpline

        count = len(self.knots) - self.degree - 1
        basis = BSpline(np.array(self.knots), np.eye(count)[self.index], self.degree)
        return np.asarray(basis(np.clip(values, self.knots[0], self.knots[-1])))


Step = Term | Number | Operation | Spline


class Computed(BaseModel):
    """A column of numbers that is computed from others.

    Attributes:
        steps: columns and numbers, each before the operation that takes it, as in reverse Polish notation.

    Examples:
        >>> column = Computed(steps=(("age", None), 50.0, "subtract", ("sex", "male"), "multiply"))
        >>> values = {("age", None): np.array([40.0, 60.0]), ("sex", "male"): np.array([0.0, 1.0])}
        >>> column.results(values.__getitem__)[-1].tolist()
        [-0.0, 10.0]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: tuple[Step, ...] = Field(max_length=MOST_STEPS)

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        depth, before = 0, math.inf
        for step in self.steps:
            takes = _taken(step)
            if depth < takes or (step == "power" and not abs(before) <= _LARGEST_POWER):
                raise ValueError(f"a step must follow what it takes, and a power be a number up to {_LARGEST_POWER:g}")
            depth, before = depth + 1 - takes, step if isinstance(step, float) else math.inf
        if depth != 1 or not self.terms or not _taken(self.steps[-1]):
            raise ValueError("the steps of a computed column must end in one number, and take a column")
        return self

    @property
    def terms(self) -> tuple[Term, ...]:
        """The columns that it is computed from."""
        return tuple(step for step in self.steps if isinstance(step, tuple))

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1, as a product of categories and splines."""
        return all(
            step == "multiply" or isinstance(step, Spline)
            or (isinstance(step, tuple) and (step[1] is not None or isinstance(after, Spline)))
            for step, after in itertools.pairwise((*self.steps, None))
        )  # fmt: skip

    def with_terms(self, change: Callable[[Term], Term]) -> Computed:
        """Return the same of other columns."""
        steps = (change(step) if isinstance(step, tuple) else step for step in self.steps)
        return self.model_copy(update={"steps": tuple(steps)})

    def results(self, values: Callable[[Term], Floats]) -> list[Floats]:
        """Return the result of each operation [n], the last of which is the column; NaN where there is none.

        Args:
            values: returns those of a column [n].
        """
        stack, results = list[Any](), list[Floats]()
        with np.errstate(all="ignore"):
            for step in self.steps:
                if takes := _taken(step):
                    taken = [stack.pop() for _ in range(takes)][::-1]
                    operation: Any = step if isinstance(step, Spline) else _UNARY.get(step, _BINARY.get(step))
                    results.append(np.asarray(operation(*taken), dtype=np.float64))
                    stack.append(results[-1])
                else:
                    stack.append(values(step) if isinstance(step, tuple) else step)
        return results


Column = Term | Computed


def terms_of_column(column: Column) -> tuple[Term, ...]:
    """Return the columns that a regressor is made of."""
    return column.terms if isinstance(column, Computed) else (column,)


def is_share(column: Column) -> bool:
    """Return whether a regressor lies between 0 and 1 whatever the rows are."""
    return column.is_share if isinstance(column, Computed) else column[1] is not None


def _taken(step: Step) -> int:
    """Return how many numbers a step takes."""
    return 1 if isinstance(step, Spline) or step in _UNARY else 2 if step in _BINARY else 0


_LONGEST, _MOST_NAMES, _MOST_CROSSED, _MOST_SUMS = 1000, 60, 8, 5
_CATEGORIES = "C"
_LOGARITHMS = {"log": 1.0, "log2": math.log(2), "log10": math.log(10)}
_FUNCTIONS = ("log", "log2", "log10", "log1p", "exp", "sqrt", "abs")
_FROM_ROWS = ("bs", "center", "standardize")
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.Pow: "power",
}  # fmt: skip
_ALLOWED = (
    "C(x), Q('x'), I(...) with + - * / and **, bs(x, df=4), center(x), standardize(x), and np.log, np.log2, np.log10, "
    "np.log1p, np.exp, np.sqrt and np.abs"
)
Steps = tuple[Step, ...]


class KnowsColumns(Protocol):
    """What a formula asks about columns."""

    @property
    def categories(self) -> Mapping[str, Sequence[str]]:
        """The categories of columns of text."""

    def term(self, name: str, value: str | None, /) -> Term:
        """Return a column, or whether it has a category, as plans name it."""

    def values_of(self, name: str, /) -> Sequence[str]:
        """Return the categories of a column, also where they are numbers."""

    def pooled(self, name: str, shares: Sequence[float], /) -> tuple[float, float, Floats]:
        """Return the mean, the deviation and quantiles of a column over all clients."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula whose syntax is known to be allowed.

    Attributes:
        text: the formula.
        target: the column on its left side, None where there is none.
        names: the columns on its right side.
        factors: what stands between the operators, by its text.
        terms: products of these.
    """

    text: str
    target: str | None
    names: tuple[str, ...]
    factors: Mapping[str, ast.expr]
    terms: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, text: str) -> Formula:
        """Read a formula.

        Raises:
            SettingError: it is none, names something else than columns, or formulaic is missing.
        """
        parser = import_extra("formulaic.parser", "formulas", "formulas need formulaic").DefaultFormulaParser
        # a name between backticks is data, and from here on a text
        plain = re.sub(r"`([^`]*)`", lambda match: f"Q({match[1]!r})", text)
        _check_size(text, plain)
        try:
            sides = parser(feature_flags={"twosided"}).get_terms(plain)
        except Exception as error:  # what a formula may be wrong in has many kinds of errors there
            raise SettingError(f"the formula {shown(text, 80)} is not understood: {shown(str(error), 120)}") from None
        left, right = (list(sides.lhs), list(sides.rhs)) if hasattr(sides, "lhs") else ([], list(sides))
        factors: dict[str, ast.expr] = {}
        terms = []
        for term in right:
            names = [factor.expr for factor in term.factors if factor.expr != "1"]
            factors |= {name: _parsed(name) for name in names if name not in factors}
            terms.append(tuple(names))
        if () not in terms:
            raise SettingError("a model has an intercept, which a formula can't take away: leave out - 1 and + 0")
        targets = [_column(_parsed(factor.expr)) for term in left for factor in term.factors]
        if len(targets) > 1 or None in targets:
            raise SettingError(f"the left side of a formula is one column, got {shown(text, 80)}: compute it before")
        columns = dict.fromkeys(name for tree in factors.values() for name in _names(tree))
        return cls(text, next(iter(targets), None), tuple(columns), factors, tuple(filter(None, terms)))

    def columns(self, asked: KnowsColumns) -> tuple[list[str], list[Column]]:
        """Return the names of the regressors, and what computes them.

        Args:
            asked: the columns of clients.

        Raises:
            SettingError: a function needs what clients do not tell.
        """
        words = {name: levels for name, tree in self.factors.items() if (levels := _levels(tree, asked)) is not None}
        numbers = {name: _numbers(tree, asked) for name, tree in self.factors.items() if name not in words}
        names, columns = list[str](), list[Column]()
        for product in self._products(words):
            parts = [
                _indicators(*words[name], first, asked) if name in words else numbers[name] for name, first in product
            ]
            for chosen in itertools.product(*parts):
                steps = chosen[0][1]
                for _, more in chosen[1:]:
                    steps = (*steps, *more, "multiply")
                names.append(":".join(label for label, _ in chosen))
                columns.append(_as_column(steps, self.text))
        return names, columns

    def _products(self, words: Mapping[str, Any]) -> list[list[tuple[str, int]]]:
        """Return the products of factors, and whether the first category of each has no column in them."""
        pandas = import_extra("pandas", "formulas", "formulas need pandas")
        formulaic = import_extra("formulaic", "formulas", "formulas need formulaic")
        # formulaic sees stand-ins for the factors, so that nothing that somebody wrote is ever evaluated
        stands = {name: f"f{index}" for index, name in enumerate(self.factors)}
        frame = pandas.DataFrame({
            stand: pandas.Categorical(["u", "v"]) if name in words else [1.0, 2.0] for name, stand in stands.items()
        })  # fmt: skip
        text = " + ".join(["1", *(":".join(stands[name] for name in term) for term in self.terms)])
        names = {stand: name for name, stand in stands.items()}
        matrix = formulaic.model_matrix(text, frame, context={})
        return [
            [(names[factor.factor.expr], int(factor.reduced)) for factor in scoped.factors]
            for part in matrix.model_spec.structure for scoped in part.scoped_terms if scoped.factors
        ]  # fmt: skip


def with_formula(
    text: str | None, columns: Sequence[str] | None, target: str | None = None
) -> tuple[Formula | None, Sequence[str] | None, str | None]:
    """Return a formula, the columns that it names in place of those that are listed, and the target.

    Raises:
        SettingError: columns or another target were named beside it.
    """
    if text is None:
        return None, columns, target
    if columns is not None:
        raise SettingError("a formula names the columns: give formula or columns")
    formula = Formula.of(text)
    if target is not None and formula.target not in (None, target):
        raise SettingError(f"the formula's target is {formula.target!r}, got the target {target!r}: leave one out")
    return formula, formula.names, formula.target or target


def _check_size(text: str, plain: str) -> None:
    """Refuse a formula of so many terms that its algebra would take long."""
    names, crossed = len(re.findall(r"[^\W\d]\w*", plain)), len(re.findall(r"(?<!\*)\*(?!\*)", plain))
    # sums that are multiplied with one another
    powers = [int(power) for power in re.findall(r"\)\s*(?:\*\*|\^)\s*(\d{1,9})", plain)]
    sums = len(re.findall(r"\)\s*(?:\*(?!\*)|:|/|%)|(?:(?<!\*)\*|:|/|%)\s*\(", plain)) + sum(powers)
    if len(text) > _LONGEST or names > _MOST_NAMES or crossed > _MOST_CROSSED or sums > _MOST_SUMS:
        raise SettingError(
            f"a formula has at most {_LONGEST} characters, {_MOST_NAMES} names, {_MOST_CROSSED} signs * and "
            f"{_MOST_SUMS} products of sums, got {shown(text, 60)}: name fewer columns"
        )


def _refused(node: ast.AST | str, reason: str = "is no part of a formula here") -> SettingError:
    text = node if isinstance(node, str) else ast.unparse(node)
    return SettingError(f"{shown(text, 60)} {reason}: allowed are columns, {_ALLOWED}")


def _parsed(text: str) -> ast.expr:
    """Return the tree of a factor.

    Raises:
        SettingError: there is something else in it than columns, numbers and what is allowed.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text) from None
    if _function(tree) == _CATEGORIES:
        _categories(tree)
    elif isinstance(tree, ast.Constant):
        raise _refused(text, "has no column")
    else:
        _check(tree)
    return tree


def _check(node: ast.expr) -> None:
    """Refuse a tree that is no computation."""
    if _column(node) is not None or _number(node) is not None:
        return
    function = _function(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left)
        _check(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        _check(node.operand)
    elif function in _FUNCTIONS or function == "I":
        _check(_arguments(node, ("x",))["x"])
    elif function in _FROM_ROWS:
        _from_rows(node)
    else:
        raise _refused(node)


def _number(node: ast.AST) -> float | None:
    """Return a number, also a negative one; None for what is none."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    number: Any = node.value if isinstance(node, ast.Constant) else None
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return float(number) if is_number and abs(number) < 1e300 else None


def _column(node: ast.AST) -> str | None:
    """Return the name of a column: x, one with dots as R writes them, or Q("any name"); None for what is none."""
    if isinstance(node, ast.Call) and _function(node) == "Q":
        name = _arguments(node, ("name",))["name"]
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
    if isinstance(node, ast.Attribute):
        before = _column(node.value) if isinstance(node.value, ast.Name | ast.Attribute) else None
        return None if before is None else f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _function(node: ast.AST) -> str | None:
    """Return the name of the function that is called, None where none is."""
    if not isinstance(node, ast.Call):
        return None
    named = _column(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else None
    return None if named is None else named.removeprefix("np.").removeprefix("numpy.")


def _arguments(node: ast.AST, names: Sequence[str]) -> dict[str, ast.expr]:
    """Return the arguments of a call by their names; the first one must be there."""
    assert isinstance(node, ast.Call)
    given = dict(zip(names, node.args, strict=False))
    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if (
        len(node.args) + len(node.keywords) != len({*given, *named})
        or not {*named} <= {*names}
        or names[0] not in {*given, *named}
    ):
        raise _refused(node, f"takes {', '.join(names)}")
    return given | named


def _first(node: ast.Call) -> ast.expr:
    """Return the argument x of a call, which has one."""
    return next(iter(node.args), None) or next(keyword.value for keyword in node.keywords if keyword.arg == "x")


def _names(node: ast.expr) -> list[str]:
    """Return the columns in a tree."""
    if (name := _column(node)) is not None:
        return [name]
    if isinstance(node, ast.Call):
        return _names(_first(node))
    return [name for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) for name in _names(child)]


def _categories(node: ast.expr) -> tuple[str, str | None]:
    """Return the column of C(...), and the category that others are compared with, None for the first."""
    arguments = _arguments(node, ("x", "contrast"))
    name, contrast = _column(arguments["x"]), arguments.get("contrast")
    if name is None:
        raise _refused(node, "takes a column")
    if contrast is None:
        return name, None
    if _function(contrast) not in ("Treatment", "contr.treatment"):
        raise _refused(contrast, "is no contrast here, but Treatment('reference')")
    reference = _arguments(contrast, ("reference",))["reference"] if isinstance(contrast, ast.Call) else contrast
    if isinstance(reference, ast.Constant) and isinstance(reference.value, str):
        return name, reference.value
    if (number := _number(reference)) is None:
        raise _refused(contrast, "names no category")
    return name, f"{number:g}"


def _levels(node: ast.expr, asked: KnowsColumns) -> tuple[str, list[str]] | None:
    """Return a column and its categories, from the one that others are compared with on; None of numbers."""
    name, reference = _column(node), None
    if _function(node) == _CATEGORIES:
        name, reference = _categories(node)
        words = list(asked.values_of(name))
    elif name is not None and name in asked.categories:
        words = list(asked.categories[name])
    else:
        return None
    if reference is None:
        return name, words
    if reference not in words:
        raise SettingError(f"{name!r} has no category {shown(reference, 30)}: it has {shown(', '.join(words), 80)}")
    return name, [reference, *(word for word in words if word != reference)]


def _indicators(name: str, words: Sequence[str], first: int, asked: KnowsColumns) -> list[tuple[str, Steps]]:
    """Return the names and steps of the categories of a column, from the first one that has a column on."""
    return [(f"{name}={word}", (asked.term(name, word),)) for word in words[first:]]


def _numbers(node: ast.expr, asked: KnowsColumns) -> list[tuple[str, Steps]]:
    """Return the names and steps of the columns that a factor of numbers stands for."""
    label = _column(node) or ast.unparse(node)
    if _function(node) != "bs":
        return [(label, _steps(node, asked))]
    arguments = _from_rows(node)
    degree, inner = int(arguments.get("degree", 3)), [*arguments.get("knots", ())]
    ends = [arguments.get("lower_bound"), arguments.get("upper_bound")]
    count = int(arguments["df"]) - degree if "df" in arguments else len(inner)
    if count < 0:
        raise _refused(node, f"has at least {degree} degrees of freedom")
    if None in ends or ("df" in arguments and count):
        column = _column(arguments["x"])
        if column is None:
            raise _refused(node, "takes a column, or knots, lower_bound and upper_bound")
        shares = np.linspace(0, 1, count + 2)
        found = asked.pooled(column, shares.tolist())[2]
        ends = [own if end is None else end for end, own in zip(ends, found[[0, -1]].tolist(), strict=True)]
        inner = inner or found[1:-1].tolist()
    knots = (*[ends[0]] * (degree + 1), *inner, *[ends[1]] * (degree + 1))
    steps = _steps(arguments["x"], asked)
    try:
        # the first function is left out, as all of them add up to the intercept
        return [
            (f"{label}[{index}]", (*steps, Spline(degree=degree, knots=knots, index=index)))
            for index in range(1, degree + len(inner) + 1)
        ]
    except ValidationError:
        listed = ", ".join(f"{knot:g}" for knot in (ends[0], *inner, ends[1]))
        raise SettingError(
            f"the knots of {label} are {listed}, and must increase: name others, or fewer degrees of freedom"
        ) from None


def _from_rows(node: ast.expr) -> dict[str, Any]:
    """Return the arguments of a function that takes numbers of all rows.

    Raises:
        SettingError: an argument is no number.
    """
    names = ("x", "df", "knots", "degree", "lower_bound", "upper_bound") if _function(node) == "bs" else ("x",)
    arguments: dict[str, Any] = dict(_arguments(node, names))
    _check(arguments["x"])
    if names == ("x",) and _column(arguments["x"]) is None:
        raise _refused(node, "takes a column")
    for name in {*arguments} - {"x"}:
        listed = arguments[name].elts if isinstance(arguments[name], ast.Tuple | ast.List) else [arguments[name]]
        numbers = [_number(value) for value in listed]
        if None in numbers or (name != "knots" and len(numbers) > 1):
            raise _refused(node, f"takes numbers for {name}")
        arguments[name] = numbers if name == "knots" else numbers[0]
    whole = {name: arguments[name] for name in ("df", "degree") if name in arguments}
    if any(value != int(value) or not 0 <= value <= 50 for value in whole.values()) or (
        "df" in whole and "knots" in arguments
    ):
        raise _refused(node, "takes df or knots, and whole numbers for df and degree")
    return arguments


def _steps(node: ast.expr, asked: KnowsColumns) -> Steps:
    """Return the steps that compute a tree, which has been checked."""
    if (name := _column(node)) is not None:
        if name in asked.categories:
            raise SettingError(
                f"column {name!r} holds categories, which cannot be computed with: leave it out of {name!r}"
            )
        return (asked.term(name, None),)
    if (number := _number(node)) is not None:
        return (number,)
    if isinstance(node, ast.BinOp):
        return (*_steps(node.left, asked), *_steps(node.right, asked), _OPERATORS[type(node.op)])
    if isinstance(node, ast.UnaryOp):
        return (0.0, *_steps(node.operand, asked), "subtract")
    function = _function(node)
    assert isinstance(node, ast.Call)
    inner = _steps(_first(node), asked)
    if function in ("center", "standardize"):
        mean, deviation, _ = asked.pooled(str(_column(_first(node))), ())
        scaled: Steps = () if function == "center" else (deviation or 1.0, "divide")
        return (*inner, mean, "subtract", *scaled)
    if function == "log1p":
        return (*inner, 1.0, "add", "log")
    if function in _LOGARITHMS:
        return (*inner, "log", *(() if function == "log" else (_LOGARITHMS[function], "divide")))
    operation: Any = function
    return inner if function == "I" else (*inner, operation)


def _as_column(steps: Steps, text: str) -> Column:
    """Return a column of the rows, or a computed one."""
    if len(steps) == 1 and isinstance(steps[0], tuple):
        return steps[0]
    try:
        return Computed(steps=steps)
    except ValidationError:
        raise SettingError(
            f"a column of the formula {shown(text, 80)} is no computation that sites take: a power must be a number up "
            "to 10, and there are at most 64 steps"
        ) from None
