"""The adviser: whether clients should train together, by which method, the gain of each, and reasons for it.

A reason is a sentence that states a difference that is beyond noise (p < 0.05).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from piebald.advice.answer import DISTILLED, ENSEMBLE, Advice
from piebald.advice.distillation import RUNS as DISTILLATION
from piebald.advice.distillation import Distillation
from piebald.advice.ensemble import Refit, ensemble
from piebald.advice.evidence import (
    PlainAlone,
    check,
    client_gains,
    losers,
    own_methods,
    strongest_plain,
    under_seeds,
    whether_it_pays,
)
from piebald.advice.first_look import look as look_at
from piebald.advice.more_data import SHARE, outlook
from piebald.advice.more_data import more_data as train_with_parts
from piebald.advice.odd_sites import far_targets, in_points, misfits, nearness, odd_sites, over_rows
from piebald.advice.race import ALONE, TOGETHER, Race, Runner, check_training, entrants, lag_behind, methods_of
from piebald.advice.tuning.search import ROUNDS, claim, spent_together
from piebald.advice.tuning.space import Budget, Cost, rungs_of
from piebald.advice.tuning.trial_runs import TrialRuns, cost_of, words
from piebald.contracts import Clients, Personalizes
from piebald.core.arguments import Count, PathLike, Seeds
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.progress import line_writer
from piebald.core.result_table import ResultTable
from piebald.data.clients.sources import clients_of
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import SearchKeywords, takes
from piebald.methods.clustering.single_cluster import SingleCluster
from piebald.methods.recipe import Recipe
from piebald.methods.sharing.layers import Full
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import names, plural
from piebald.report.paired import Scores, common_seeds, difference, probability_within
from piebald.report.row_noise import COUNTED, imbalance
from piebald.report.tables import History
from piebald.report.verdict import ScoreVerdict
from piebald.runs.compare import folder_name, model_of, recipes_by_label
from piebald.runs.plain_models import PlainModels
from piebald.runs.prepare import Model
from piebald.runs.run import opened as opened_run
from piebald.runtimes.base import SimulatesDevices

Floats = NDArray[np.float64]
_FEWEST = 4  # clients of a half
_LEVEL = 0.05 / 4  # of each reason: two properties and two rivals are looked at


def reasons(chosen: Runner, alone: Runner | None, together: Runner | None, runs: TrialRuns) -> list[str]:
    """Return sentences on the clients that gain, and on the effect of more rounds."""
    sentences = []
    for rival, name in ((together, "FedAvg"), (alone, "training alone")):
        if rival is None or rival is chosen:
            continue
        gain = _gain(chosen, rival, runs.higher_is_better)
        sentences += _by_property(gain, _classes(runs), name, "classes", runs)
        sentences += _by_property(gain, _rows(runs), name, "training rows", runs)
    sentences += _of_rounds(chosen, runs)
    return sentences


def _gain(chosen: Runner, rival: Runner, higher: bool) -> Floats:
    """Return the gain of each client [c], the mean over common seeds."""
    seeds = common_seeds([chosen.last, rival.last])
    ours, theirs = (runner.last.of_seeds(seeds) for runner in (chosen, rival))
    # both tables have the same clients and seeds by now, so they are subtracted cell by cell
    gains = replace(ours, values=ours.values - theirs.values).client_means()
    return np.asarray(gains if higher else -gains, dtype=np.float64)


def _rows(runs: TrialRuns) -> Floats | None:
    sizes = [runs.choosing.size(client, "train") for client in range(len(runs.names))]
    return None if any(size is None for size in sizes) else np.array(sizes, dtype=np.float64)


def _classes(runs: TrialRuns) -> Floats | None:
    counts = [runs.choosing.counts(client, "train") for client in range(len(runs.names))]
    if any(row is None for row in counts):
        return None
    return np.array([sum(count > 0 for count in row or ()) for row in counts], dtype=np.float64)


def _by_property(gain: Floats, values: Floats | None, rival: str, prop: str, runs: TrialRuns) -> list[str]:
    """The gains of clients below and above the median of a property, where they differ by Welch's test."""
    from scipy.stats import ttest_ind

    if values is None:
        return []
    scored = ~np.isnan(gain)
    # of the clients that have a gain, so that both halves are of about the same size
    middle = float(np.median(values[scored])) if scored.any() else 0.0
    few, many = gain[scored & (values < middle)], gain[scored & (values >= middle)]
    # Welch's test of equal gains would divide by a variance of 0
    if min(len(few), len(many)) < _FEWEST or np.ptp(gain[scored]) < 1e-9:
        return []
    if not ttest_ind(few, many, equal_var=False).pvalue < _LEVEL:
        return []
    below, above = (in_points(runs.metric, float(half.mean())) for half in (few, many))
    return [f"Against {rival}, clients with fewer than {middle:,.0f} {prop} gain {below}, the others {above}."]


def _of_rounds(chosen: Runner, runs: TrialRuns) -> list[str]:
    """Return what the second half of the rounds has changed, where that is beyond noise."""
    rungs = sorted(chosen.scores)
    if chosen.stopped:  # its last scores are not of the last rung's rounds
        return []
    if len(rungs) < 2 or rungs[-1] != runs.rungs[-1]:
        return []
    step = difference(chosen.scores[rungs[-1]], chosen.scores[rungs[-2]])
    if step is None or step.p >= ERROR_RATE:
        return []
    gain = in_points(runs.metric, step.mean if runs.higher_is_better else -step.mean)
    verdict = outlook("more rounds", step, runs.higher_is_better, nearness(runs.metric, chosen.mean))
    return [f"From {rungs[-2]} to {plural(rungs[-1], 'round')} it gained {gain}: {verdict}."]


BUDGET = 20  # whole runs
ALL_ROWS = 0.15  # of the budget that is kept to train the ensemble on validation rows as well: three of twenty runs
RUNGS, FACTOR = 3, 2  # settings are judged after a quarter and half of the rounds, and at the end
_SURELY = 2.0  # standard errors by which a client must be better off alone to be told so
CLEARLY_LESS = 0.5  # of the traffic of the best method
_FEW = 10  # clients that may have a row each without a doubt of what a client is


class AdviceSettings(ExperimentSettings):
    """An experiment file that needs no recipe: the adviser finds one, and those of the file are raced as well."""

    needs_recipe: ClassVar[bool] = False


@takes(SearchKeywords)
def advise(
    clients: Clients | Any,
    model: Model,
    *,
    budget: Budget | int | str | Mapping[str, Any] | None = None,
    rounds: Count = ROUNDS,
    seeds: Seeds = (0, 1, 2),
    methods: Mapping[str, Recipe | str] | Sequence[Recipe | str] = (),
    families: Sequence[str] | None = None,
    training: Mapping[str, Any] | None = None,
    out: PathLike | None = None,
    progress: bool = False,
    look: bool = False,
    more_data: bool = True,
    save_traffic: bool = False,
    distil: bool = False,
    settings: Mapping[str, Any] | None = None,
    **keywords: Unpack[SearchKeywords],
) -> Advice:
    """Choose a method for clients that are not alike: whether to train together, how, and who loses by it.

    A race over a portfolio of recipes with settings that have done well elsewhere: all are trained for a quarter of the
    rounds, the best eight for half of them, the best six to the end, and Local with them; the best two and Local are
    repeated with other seeds.  Only validation rows are looked at; where no client has any, a fifth of each client's
    training rows is held out.  Local has as many settings as any other recipe, and is stopped where validation rows are
    best; for tables scikit-learn fits plain models to each client's rows as well, and whether training together pays
    is said against the best of all these.  At the end test rows are opened once: for the leader and the recommendation,
    Local, FedAvg, the best plain model, and an ensemble of what was trained to the end, whose members are trained once
    more on validation rows as well, for which 15 % of the budget is kept.

    The recommendation is the method with the best mean.  Where traffic is dear (`save_traffic`, or a budget in bytes)
    and another one within one standard error of it, and within one point (one hundredth of the best, where the metric
    is no share), sends less than half as much, it is the one that sends least.

    Args:
        clients, model: see `run`.
        budget: of the search: a number of server steps over all runs, words such as "10 minutes", or {"bytes": 10**9};
            20 whole runs by default, and three more to distil.  Local and one other are trained to the end whatever
            they cost.
        rounds: server steps of a whole run.
        seeds: the race is run with the first; what is left at the end with the others as well.
        methods: recipes to race beside the portfolio, each as it is and with its settings of the portfolio.
        families: the recipes to race in place of the portfolio; Local and FedAvg always are.
        training: settings that all recipes share, such as {"batch": 20, "epochs": 2, "cohort": 10}.
        out: a folder, in which an interrupted search goes on, and which holds answer.json, answer.html and
            recommended.toml at the end; a temporary one by default.
        progress: print a line to standard error for each event; with `out` they go to its log.txt, and the last one
            is shown.
        look: look at the clients before any training, see `advice.look`; it is said first.
        more_data: keep a tenth of the budget to train the recommendation with half and a quarter of the rows, and of
            the clients, and say what more of them has changed.
        save_traffic: of methods that are about as good, recommend the one that sends least.
        distil: train one model towards the ensemble as well, and score it beside it, see `Distilled`.
        settings: plain values kept with the search, from which the command line rebuilds it to go on.
        keywords: settings of all runs, see `RunSettings`.

    Raises:
        SettingError: a setting is wrong, there is one client, or no method can be trained by these
            clients.
        RunFolderError: `out` holds something else.
        RuntimeFault: Local, FedAvg and all others failed.
    """
    # clients that depend on the seed are raced as those of the first one, so that all recipes see the same rows
    federation = clients_of(clients(seeds[0]) if callable(clients) else clients)
    if len(federation) < 2:
        raise SettingError("there is one client, which has nobody to train with: give at least two, or use run")
    shared = dict(training or {})
    check_training(shared)
    raced_too = recipes_by_label(methods) if methods else {}
    model_of(ALONE, model)  # of which there must be one
    refuse_pointless(federation)
    began = processor_seconds()
    whole_runs = BUDGET + (DISTILLATION if distil else 0)
    limit = Budget.of(whole_runs * rounds if budget is None else budget)
    runs = TrialRuns.of({}, federation, model, rungs_of(rounds, RUNGS, FACTOR), keywords)
    judge = Judge(runs)
    # recipes that these clients cannot train drop out before any budget is spent on them
    field, unusable = entrants(federation, _fleet(runs), shared, raced_too, families, refused=judge.refused)
    if not field:
        raise SettingError(f"no method can be trained by these clients: {next(iter(unusable.values()))}")
    # with the metric that the usable recipes are judged by, which is known only once they were prepared
    runs = judge.runs
    describe = {
        "kind": "advise", "rounds": rounds, "seeds": list(seeds), "budget": str(limit), "clients": len(federation),
        "more_data": more_data, "save_traffic": save_traffic, "distil": distil,
        "recipes": [entrant.recipe.model_dump() for entrant in field], "settings": settings,
    }  # fmt: skip
    with ExitStack() as stack:
        folder = Path(out if out is not None else stack.enter_context(tempfile.TemporaryDirectory()))
        # before the first line is written: a folder of another search stays as it is
        claim(folder, describe)
        # copies of runs, whose privacy budgets would count again where a search goes on
        for copies in (ENSEMBLE, DISTILLED):
            shutil.rmtree(folder / copies, ignore_errors=True)
        say = line_writer(progress, None if out is None else folder / "log.txt")
        look_text = _look_text(runs, model) if look else None
        for line in [*(look_text or "").splitlines(), *_conditions(runs, unusable)]:
            say(line)
        # a share is kept back, or the race would leave nothing for the parts of the rows
        kept = DISTILLATION / whole_runs if distil else 0.0
        answer_budget = limit.part((1 - kept) * (1 - SHARE if more_data else 1))
        race = Race(runs, tuple(seeds), folder, answer_budget.part(1 - ALL_ROWS), say)
        raced, failed, spent = race.run(field)
        refit = Refit(runs, folder, answer_budget, spent, say)
        # what is left of the budget for it, and what the ensemble has left over
        distillation = (
            Distillation(runs, folder, limit.part(1 - SHARE) if more_data else limit, say) if distil else None
        )
        is_dear = save_traffic or limit.unit == "bytes"
        left_out, kept_folder = {**unusable, **failed}, None if out is None else folder
        advice, chosen = _answer(raced, runs, left_out, seeds, kept_folder, settings, folder, is_dear, refit,
                                 distillation)  # fmt: skip
        refit.close()
        if more_data:
            gains_of_more, cost = train_with_parts(chosen, runs, folder, limit, advice.spent, say)
            advice = replace(advice, more=gains_of_more, spent=advice.spent + cost)
        # after the runs with parts of the rows, whose updates were sent as well
        privacy, processors = spent_together(folder), processor_seconds() - began
        # last, since the budget counts rounds that recipes share for each of them
        trained = advice.spent - race.shared - refit.shared
        advice = replace(advice, look=look_text, privacy=privacy, processor_seconds=processors, spent=trained)
        advice.save(folder)
        say("")
    return advice


class Judge:
    """Asks which recipes these clients can train.

    Attributes:
        runs: the settings of the runs, with the metric by which the last usable recipe is judged.
    """

    def __init__(self, runs: TrialRuns) -> None:
        self.runs = runs

    def refused(self, recipe: Recipe, label: str) -> str:
        """Return the reason why a recipe cannot be trained, empty if it can."""
        try:
            self.runs = self.runs.judged_as(recipe, label)
        except SettingError as error:
            return str(error)
        return ""


def _look_text(runs: TrialRuns, model: Model) -> str:
    """Return the text of the look at the clients, before any training."""
    return look_at(runs.choosing.opened(), model, fleet=_fleet(runs), **runs.objective).text()


def _conditions(runs: TrialRuns, unusable: Mapping[str, str]) -> list[str]:
    """Return the lines before the race: the rows that are looked at, and the methods that cannot be used."""
    lines = [f"{label} cannot be used: {reason}" for label, reason in unusable.items()]
    # first, since it changes what all scores below it are of
    if runs.choosing.held_out:
        lines.insert(
            0, "no client has validation rows: a fifth of each client's training rows is held out while choosing"
        )
    return lines


def _same_rung(alone: Runner, runners: Sequence[Runner]) -> tuple[Scores | None, Scores | None]:
    """The scores of Local and of the method with one model for all that came furthest, at the last rung of both."""
    furthest = _one_model(runners)
    # scores after different numbers of rounds cannot be compared
    rungs = furthest.scores.keys() & alone.scores.keys() if furthest else set[int]()
    return (alone.scores[max(rungs)], furthest.scores[max(rungs)]) if furthest and rungs else (None, None)


def _one_model(runners: Sequence[Runner]) -> Runner | None:
    """The method with one model for all that came furthest."""
    return max((x for x in runners if _has_one_model(x.recipe)), key=lambda runner: runner.reached, default=None)


def _misfits(together: Runner | None, runs: TrialRuns, folder: Path) -> list[str]:
    """Return a sentence on sites where one model for all is wrong as nowhere else, also on their training rows."""
    if together is None or runs.metric != COUNTED:
        return []
    judged = runs.read(together.folders, together.reached)
    try:
        (fit,) = check([together], runs, folder, "train") or (None,)
    except SettingError:  # scores on training rows tell what the method's noise hides
        return []
    if judged is None or fit is None:
        return []
    own, trained = runs.naive(together.folders, together.reached), runs.naive(fit.folders)
    constants = [over_rows(own[name], trained[name]) for name in own if name in trained]
    return misfits(judged, over_rows(judged, fit.scores), constants)


def _has_one_model(recipe: Recipe) -> bool:
    """Return whether all clients use the same model."""
    # a recipe that shares all and then personalises ends with a model of each client
    shares_all = isinstance(recipe.sharing, Full) and isinstance(recipe.clustering, SingleCluster)
    return shares_all and not isinstance(recipe.training, Personalizes)


def _fleet(runs: TrialRuns) -> Any:
    runtime = runs.options["runtime"]
    return runtime.fleet if isinstance(runtime, SimulatesDevices) else None


def _answer(
    raced: Sequence[Runner],
    runs: TrialRuns,
    unusable: Mapping[str, str],
    seeds: Sequence[int],
    kept_folder: Path | None,
    settings: Mapping[str, Any] | None,
    folder: Path,
    is_dear: bool,
    refit: Refit,
    distillation: Distillation | None,
) -> tuple[Advice, Runner]:
    """The answer of a race, and the recommendation."""
    runners = methods_of(raced, runs.higher_is_better)
    # single rows are read once nothing is trained any more, and give differences the noise of rows
    finished = [_with_rows(runner, runs) for runner in runners if runner.state == "finished"]
    if not finished:
        raise RuntimeFault(f"no method could be trained to the end: {runners[0].why if runners else 'none is left'}")
    naive, higher = runs.naive(finished[0].folders, runs.rungs[-1]), runs.higher_is_better
    for number, runner in enumerate(finished):
        if runner.recipe.name == ALONE:
            finished[number], cost = _stopped_early(runner, runs, folder)
            refit.spent += cost
    by_label = {runner.label: runner for runner in finished}
    alone, together = (next((x for x in finished if x.entrant.recipe.name == name), None) for name in (ALONE, TOGETHER))
    label_alone = None if alone is None else alone.label
    plain_models = _plain_models(finished, runs)
    plain_alone = strongest_plain(alone, plain_models, runs)
    chosen, verdict = choose(finished, label_alone, naive, runs, is_dear, plain_alone)
    best, scores = by_label[verdict.leader], {label: by_label[label].last for label in verdict.leads}
    # a method without common seeds and clients has no difference whose chance could be drawn
    paired = {label: table for label, table in scores.items() if difference(table, chosen.last) is not None}
    probability = probability_within(paired, chosen.label, nearness(runs.metric, best.mean), higher)
    tested = check([*dict.fromkeys(filter(None, (chosen, best, alone, together)))], runs, folder / "check")
    opened = {checked.label: checked.scores for checked in tested}
    evidence = whether_it_pays(finished, alone, best, tested, runs, plain_alone)
    plain = runs.naive(tested[0].folders) if chosen.label in opened else naive
    histories = [History(place) for checked in tested for place in checked.folders.values()]
    skewed = "" if runs.metric == "balanced_accuracy" else imbalance(histories)
    # closed before the folders are read anew or, where they are temporary, removed
    for history in histories:
        history.close()
    pair = {runner.label: runner.last for runner in (chosen, alone) if runner is not None}
    own = own_methods(pair, chosen.label, higher, errors=_SURELY)
    better_alone = [client for client, label in own.items() if label != chosen.label]
    best_rounds, better = rounds_of(chosen, runs)
    at_odds = odd_sites(
        None if alone is None else alone.last, None if together is None else together.last, naive, runs.metric, higher
    )
    if together is None and alone is not None:  # one model for all may have been dropped because of such sites
        at_odds += odd_sites(*_same_rung(alone, runners), {}, runs.metric, higher)
    at_odds += _misfits(together or _one_model(runners), runs, folder / "fit")
    ended = [runner for runner in raced if runner.state == "finished"]
    averaged = ensemble(ended, chosen, tested, runs, refit, plain_models)
    spent, distilled = refit.spent + refit.cost, None
    if distillation is not None and averaged is not None:
        distilled = distillation(averaged, chosen, tested, spent)
        spent += distillation.cost
    if better_alone:
        better = [*better, f"Better off alone, beyond chance: {names(better_alone, 12)}."]
    advice = Advice(
        recommended=chosen.label,
        recipe=chosen.recipe,
        title=chosen.entrant.title,
        metric=runs.metric,
        higher_is_better=higher,
        pays=evidence.pays,
        evidence=evidence,
        verdict=verdict,
        against_naive=ScoreVerdict.of(
            {chosen.label: opened.get(chosen.label, chosen.last)}, runs.metric, higher, naive=plain
        ),
        imbalance=skewed,
        probability=probability,
        gain_alone=None if alone is None or alone is chosen else difference(chosen.last, alone.last),
        gain_together=None if together is None or together is chosen else difference(chosen.last, together.last),
        losers=losers(chosen, alone, finished, higher),
        reasons=[*reasons(chosen, alone, together, runs), *better],
        tried=_tried([by_label.get(runner.label, runner) for runner in runners], best, runs),
        curve=_curve(chosen),
        cost=chosen.run or Cost(),
        spent=spent,
        tested=tested,
        clients=client_gains(tested, chosen.label, label_alone, runs),
        unusable=unusable,
        rounds=runs.rungs[-1],
        seeds=list(seeds),
        folder=kept_folder,
        settings=settings,
        own=own_methods(scores, chosen.label, higher),
        better_alone=better_alone,
        odd=[*far_targets(runs.clients, runs.names), *at_odds],
        best_rounds=best_rounds,
        plain_alone=plain_alone,
        ensemble=averaged,
        distilled=distilled,
        # held-out rows are the search's own: another run has none to choose by
        keep="best_for_each" if better_alone and not runs.choosing.held_out else None,
    )
    return advice, chosen


def _curve(chosen: Runner) -> dict[int, float]:
    """The mean on validation rows after each rung, or the rounds at which it was stopped, with the first seed."""
    means = {rung: table.of_seeds(table.seeds[:1]).mean for rung, table in chosen.scores.items()}
    if chosen.stopped:
        means[chosen.stopped] = means.pop(chosen.reached)
    return dict(sorted(means.items()))


def refuse_pointless(clients: Clients) -> None:
    """Refuse clients that have a row each, or a single class in all rows, before anything is trained.

    Raises:
        SettingError: nothing can be learned from these rows, or there are no clients to speak of.
    """
    sizes = [clients.size(client, "train") for client in range(len(clients))]
    single = sum(size is not None and size < 2 for size in sizes)
    if single > max(_FEW, len(sizes) / 2):
        raise SettingError(
            f"{single:,} of {len(sizes):,} clients have fewer than two training rows: name as client who keeps the "
            "rows, such as a hospital, and not what each row is about"
        )
    counts = [clients.counts(client, "train") for client in range(len(clients))]
    if all(row is not None for row in counts):
        classes = np.array([row for row in counts if row is not None]).sum(0)
        if (classes > 0).sum() == 1:
            number = int(classes.argmax())
            only = clients.classes[number] if clients.classes else number
            raise SettingError(f"all training rows have the class {only!r}: there is nothing to learn")


def processor_seconds() -> float:
    """The seconds that the processors have worked for this process and for those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _plain_models(finished: Sequence[Runner], runs: TrialRuns) -> PlainModels | None:
    """The plain models that fit these clients' rows, by the metric of a run; None where noise hides rows of a run.

    They are made without noise, and would lie beside what has a budget, as `score_beside` says of a comparison.
    """
    models = None
    for runner in finished:
        folder, model = next(iter(runner.folders.values())), runs.model_of(runner.label)
        with opened_run(folder, runs.choosing, model, recipe=runner.recipe, **runs.objective) as run:
            if run.spent:
                return None
            models = models or PlainModels(runs.choosing, run.work.objective)
    return models if models is not None and models.makers else None


def _stopped_early(alone: Runner, runs: TrialRuns, folder: Path) -> tuple[Runner, Cost]:
    """Local, trained anew for as many rounds as are best on validation rows, and the cost of that.

    It stays as it is, at no cost, where all rounds are best.  It is trained anew whatever the budget has left: it sends
    nothing, and is the measure of the others.
    """
    steps, tables = _scores_by_step(alone, runs)
    sign = 1 if runs.higher_is_better else -1
    best = max(steps, key=lambda step: sign * tables[step].mean)
    if best == steps[-1]:
        return alone, Cost()
    folders, cost = dict[int, Path](), Cost()
    for seed in alone.folders:
        folders[seed] = folder / "stopped" / folder_name(alone.label) / f"seed-{seed}"
        run = runs.train(alone.recipe, folders[seed], alone.label, seed, best)
        cost += cost_of([run])
        run.close()
    table = runs.read(folders)
    if table is None:
        return alone, cost
    return replace(alone, folders=folders, scores={**alone.scores, alone.reached: table}, stopped=best), cost


def _scores_by_step(runner: Runner, runs: TrialRuns) -> tuple[list[int], dict[int, Scores]]:
    """The server steps after which a method was scored, and its scores."""
    last = runner.stopped or runs.rungs[-1]
    with ExitStack() as stack:
        histories = [stack.enter_context(History(place)) for place in runner.folders.values()]
        tables = {step: runs.scores(histories, step) for step in [*range(runs.every, last, runs.every), last]}
    return [step for step, table in tables.items() if table.present], tables


def rounds_of(chosen: Runner, runs: TrialRuns) -> tuple[int, list[str]]:
    """Return the server steps after which a method was best on validation rows, and a sentence where they are fewer.

    They are fewer than those of the run only where the mean was better by more than one standard error.
    """
    last, (scored, tables) = chosen.stopped or runs.rungs[-1], _scores_by_step(chosen, runs)
    sign = 1 if runs.higher_is_better else -1
    steps = max(scored, key=lambda step: sign * tables[step].mean)
    # paired over clients and seeds: the best of many steps is ahead by chance, so one standard error is asked for
    lead = difference(tables[steps], tables[last])
    if steps == last or lead is None or sign * lead.mean <= (lead.error or 0.0):
        return last, []
    gain = in_points(runs.metric, sign * lead.mean)
    said = f"After {plural(steps, 'round')} it was better than after {last} ({gain}): recommended.toml has {steps}."
    return steps, [said]


def choose(
    finished: Sequence[Runner],
    alone: str | None,
    naive: Mapping[str, Scores],
    runs: TrialRuns,
    is_dear: bool = False,
    plain_alone: PlainAlone | None = None,
) -> tuple[Runner, ScoreVerdict]:
    """Return the recommendation, and the verdict on the methods that were repeated, if any were.

    Args:
        finished: the methods that were trained to the end.
        alone: the label of Local among them, None if it is not there.
        naive: scores of answers that need no model.
        runs: the settings by which they were scored.
        is_dear: whether what is sent counts: the leader is recommended where it does not.
        plain_alone: the plain model that is better than Local where each client fits it alone, None where none is.
    """
    # a method that was lucky once does not win over those that were repeated
    repeated = {runner.label: runner for runner in finished if len(runner.last.seeds) > 1}
    by_label = repeated or {runner.label: runner for runner in finished}
    scores = {label: runner.last for label, runner in by_label.items()}
    sent = {label: float(_traffic(runner)) for label, runner in by_label.items()}
    seeds = sorted({seed for table in scores.values() for seed in table.seeds})
    plain = None if plain_alone is None else {plain_alone.name: under_seeds(plain_alone.best, seeds)}
    verdict = ScoreVerdict.of(scores, runs.metric, runs.higher_is_better, alone, naive, sent, best_alone=plain)
    assert verdict is not None  # what was finished has scores
    leader = by_label[verdict.leader]
    return (recommended([by_label[label] for label in verdict.near], leader, runs) if is_dear else leader), verdict


def _with_rows(runner: Runner, runs: TrialRuns) -> Runner:
    """A method whose last scores know those of single rows."""
    table = runs.read(runner.folders, runs.rungs[-1]) if runner.folders else None
    return runner if table is None else replace(runner, scores={**runner.scores, runs.rungs[-1]: table})


def recommended(alike: Sequence[Runner], best: Runner, runs: TrialRuns) -> Runner:
    """The best, or what sends clearly less and trails it by at most one standard error, and at most one point.

    Of a metric that is no share, one hundredth of the best's mean takes the place of the point: where a method diverges
    under one seed, its standard error says nothing.
    """
    point = nearness(runs.metric, best.mean)
    near = []
    for runner in alike:
        lag, error = lag_behind(best, runner, runs.higher_is_better)
        # both bounds: a noisy difference may hide a large lag, and a small error a lag that matters to nobody
        if runner is best or (lag <= point and (error is None or lag <= error)):
            near.append(runner)
    # a method that sends a little less is no reason to give up the best mean
    least = CLEARLY_LESS * _traffic(best)
    cheap = [runner for runner in near if _traffic(runner) < least]
    # of equal traffic, such as none at all, the simpler method
    return min(cheap, key=lambda runner: (_traffic(runner), runner.entrant.rank)) if cheap else best


def _traffic(runner: Runner) -> int:
    return runner.run.bytes if runner.run else 0


def _tried(runners: Sequence[Runner], best: Runner, runs: TrialRuns) -> ResultTable:
    sign = -1 if runs.higher_is_better else 1
    rows = []
    # those that went furthest first: a score after few rounds is no rank among later ones
    for runner in sorted(runners, key=lambda runner: (-runner.reached, sign * runner.mean)):
        # scores after different numbers of rounds say nothing about the methods
        comparable = runner.reached == best.reached
        lag, error = lag_behind(best, runner, runs.higher_is_better) if comparable else (None, None)
        cost = runner.run or Cost()
        rows.append(
            {"method": runner.label, "score": runner.mean, "behind": lag, "error": error,
             "lr": runner.entrant.settings.get("lr"), "settings": words(runner.entrant.settings),
             "megabytes": cost.bytes / 1e6 if runner.run else None, "steps": cost.steps if runner.run else None,
             "seconds": 60 * cost.minutes if runner.run else None, "rounds": runner.stopped or runner.reached,
             "seeds": len(runner.last.seeds), "trials": runner.tried,
             "what became of it": runner.state if not runner.why else f"{runner.state}: {runner.why}"}
        )  # fmt: skip
    return ResultTable(rows)
