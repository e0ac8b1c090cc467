"""Attacks on a run: what a server that is curious learns of its clients from one more round."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from potluck.analysis.attack_page import Attacked, write_attacked
from potluck.analysis.findings_tables import Numbers
from potluck.analysis.groups import enumerated
from potluck.attacks.evidence import class_evidence
from potluck.attacks.exposed import Inverted, Told, inverted, membership
from potluck.attacks.images import Lpips, mse, psnr, ssim
from potluck.attacks.inversion import STEPS
from potluck.attacks.labels import LabelScore, label_score
from potluck.attacks.membership import mean_area
from potluck.attacks.overheard import Overheard, overhear
from potluck.attacks.release import FEATURES, ReleaseAudit, audit_release, claim_of
from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.modes import threads
from potluck.experiment.folder.trained import Trained
from potluck.records import Metric

if TYPE_CHECKING:
    import pandas as pd

Teller = Callable[[str], None]
_SHOWN = 10  # images in a row of the picture


@dataclass(frozen=True)
class Effort:
    """How hard an attack tries.

    Attributes:
        images: how many examples are looked for in features, over all clients.
        steps: of the search for each.
        canaries: examples of which a private release is audited.
        seed: of the attacker's draws.
        lpips: a file of the weights of LPIPS; without it the trunk is a random one, and the number has another name.
    """

    images: int = 16
    steps: int = STEPS
    canaries: int = 512
    seed: int = 0
    lpips: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("steps", 1), ("canaries", 2), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, found {value!r}")


@dataclass(frozen=True, eq=False)
class Attack:
    """What attacks on a run found.

    Attributes:
        found: everything, as plain data.
        broken: whether a stated epsilon is less than what the attack has shown.
    """

    found: Attacked
    broken: bool

    @property
    def sentences(self) -> Sequence[str]:
        """One for each attack that could be carried out."""
        return self.found.sentences

    @cached_property
    def frames(self) -> "dict[str, pd.DataFrame]":
        """The numbers as data frames, as in the files that `write` writes.

        `audit`: of private releases. `inversion`: of images. `labels` and `membership`: of clients. An attack that
        could not be carried out has none.
        """
        import pandas as pd

        return {name: pd.DataFrame(rows) for name, rows in self.found.tables.items()}

    def write(self, to: str | Path) -> Path:
        """Write `attack.html` into a folder, and beside it in `attack/` all tables and the picture.

        Returns:
            The path of the page.
        """
        return write_attacked(self.found, Path(to))

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *self.found.remarks])


def attack_on(
    trained: Trained, title: str, metric: Metric, effort: Effort, tell: Teller = lambda words: None
) -> Attack:
    """Go on for a round in memory, listen, and attack; what cannot be attacked is left out with a remark.

    Args:
        trained: the run's models.
        title: names the run.
        metric: the run's.
        effort: how hard to try.
        tell: is called with what is being done.

    Raises:
        ConfigError: the weights of LPIPS cannot be read.
        ClientFailure: a client fails in that round.
    """
    lpips = Lpips.of_file(effort.lpips) if effort.lpips else Lpips()
    with threads(trained.threads):
        tell("one more round")
        overheard = overhear(trained.engine, trained.state)
        parts = _Parts(overheard, effort, lpips)
        if not overheard.heard:
            parts.remarks.append("Nothing was heard: the server asked no client in this round.")
        tell("private releases")
        audits = parts.audits()
        tell("labels and membership")
        parts.labels()
        parts.members()
        tell("features")
        parts.features()
    found = Attacked(title, overheard.round, metric, parts.sentences, parts.remarks, parts.tables, parts.images)
    return Attack(found, any(not one.holds for one in audits))


class _Parts:
    """The attacks on a round, one after the other, and what they have found so far."""

    def __init__(self, overheard: Overheard, effort: Effort, lpips: Lpips) -> None:
        self._overheard, self._effort, self._lpips = overheard, effort, lpips
        self.sentences, self.remarks = list[str](), list[str]()
        self.tables: dict[str, Numbers] = {}
        self.images: dict[str, NDArray[Any]] = {}

    def audits(self) -> list[ReleaseAudit]:
        """Of one client's private release, if the method makes any."""
        if claim_of(self._overheard.engine.method) is None:
            return []
        heard = next((one for one in self._overheard.heard.values() if FEATURES in one.reply), None)
        if heard is None:
            self.remarks.append("No audit: no client released features.")
            return []
        try:
            found = audit_release(self._overheard.engine, heard, self._effort.canaries, self._effort.seed)
        except ConfigError as problem:
            self.remarks.append(f"No audit: {problem}")
            return []
        self.tables["audit"] = [_audit_row(found)]
        self.sentences.append(_of_audit(found))
        return [found]

    def labels(self) -> None:
        """Of each client, which classes it has."""
        federation = self._overheard.engine.federation
        if not federation.task.has_classes:
            self.remarks.append(f"No label inference: the task {federation.task.name} has no classes.")
            return
        rows, without = Numbers(), list[ClientId]()
        for client, heard in self._overheard.heard.items():
            if (evidence := class_evidence(heard, self._overheard)) is None:
                without.append(client)
                continue
            counts = federation.sites[client].train.labels.bincount(minlength=federation.num_classes).numpy()
            equal = label_score(torch.full((len(counts),), 1 / len(counts)).double().numpy(), counts)
            found = label_score(evidence.shares, counts, told=evidence.told)
            rows.append(_label_row(client, evidence.source, found, equal))
        self._without("label inference", {"nothing in the reply tells classes": without})
        if rows:
            self.tables["labels"] = rows
            self.sentences.append(_of_labels(rows))

    def members(self) -> None:
        """Of each client, which examples it has trained on."""
        told, problems = dict[ClientId, Told](), dict[str, list[ClientId]]()
        for client, heard in self._overheard.heard.items():
            try:
                told[client] = membership(heard, self._overheard)
            except ConfigError as problem:
                problems.setdefault(str(problem), []).append(client)
        self._without("membership inference", problems)
        if told:
            self.tables["membership"] = [_member_row(client, one) for client, one in told.items()]
            self.sentences.append(_of_members(list(told.values())))

    def features(self) -> None:
        """Of the clients that send features, some of their examples."""
        senders = [client for client, heard in self._overheard.heard.items() if FEATURES in heard.reply]
        chosen = senders[: self._effort.images]
        found, problems = list[Inverted](), dict[str, list[ClientId]]()
        for place, client in enumerate(chosen):
            count = len(range(place, self._effort.images, len(chosen)))
            try:
                heard = self._overheard.heard[client]
                found.append(inverted(heard, self._overheard, count, self._effort.steps, self._effort.seed))
            except ConfigError as problem:
                problems.setdefault(str(problem), []).append(client)
        self._without("inversion", problems)
        rows = [row for one in found for row in _image_rows(one, self._lpips)]
        if rows:
            self.tables["inversion"] = rows
            self.sentences.append(_of_images(rows, found, self._lpips.name))
            self.images = _pictures(found)

    def _without(self, what: str, problems: dict[str, list[ClientId]]) -> None:
        for problem, clients in problems.items():
            if clients:
                whose = f"client{'s' if len(clients) > 1 else ''} {enumerated(clients)}"
                self.remarks.append(f"No {what} of {whose}: {problem}.")


def _audit_row(found: ReleaseAudit) -> dict[str, Any]:
    return {
        "client": found.client,
        "delta": f"{found.found.delta:g}",
        "upper_epsilon": found.upper,
        "lower_epsilon": found.found.lower,
        "most_that_could_show": found.found.ceiling,
        "canaries": found.found.canaries,
        "guesses": found.found.guesses,
        "right": found.found.right,
        "distance": found.distance,
        "noise_found_again": found.repeated,
    }


def _of_audit(found: ReleaseAudit) -> str:
    of = found.found
    said = (
        f"One private release: epsilon {found.upper:.3g} at delta {of.delta:g} is stated, and the attack shows at least"
        f" {of.lower:.2f} ({of.confidence:.0%}): {of.right} of {of.guesses} guesses right, with {of.canaries} canaries,"
        f" which can show {of.ceiling:.2f} at most."
    )
    again = f" The noise of {found.repeated} canaries was found again." if found.repeated else ""
    return said + again + ("" if found.holds else " The claim does not hold.")


def _label_row(client: ClientId, source: str, found: LabelScore, equal: LabelScore) -> dict[str, Any]:
    return {
        "client": client,
        "from": source,
        "f1": found.f1,
        "f1_of_all": equal.f1,
        "correlation": found.correlation,
        "distance": found.distance,
        "distance_of_equal": equal.distance,
    }


def _of_labels(rows: Numbers) -> str:
    f1, of_all, distance, equal = (
        fmean(row[name] for row in rows) for name in ("f1", "f1_of_all", "distance", "distance_of_equal")
    )
    return (
        f"Classes, from {_sources(row['from'] for row in rows)}: F1 {f1:.2f} ({of_all:.2f} by taking all), total"
        f" variation {distance:.2f} from the true shares ({equal:.2f} of equal ones), mean over {_clients(len(rows))}."
    )


def _member_row(client: ClientId, told: Told) -> dict[str, Any]:
    low, high = told.area.interval
    return {
        "client": client,
        "from": told.source,
        "auc": told.area.value,
        "low": low,
        "high": high,
        "members": told.area.members,
        "others": told.area.others,
    }


def _of_members(told: Sequence[Told]) -> str:
    found = mean_area([one.area for one in told])
    low, high = found.interval
    return (
        f"Membership, from {_sources(one.source for one in told)}: AUC {found.value:.2f} ({low:.2f} to {high:.2f},"
        f" 95 %), mean over {_clients(len(told))}."
    )


def _image_rows(one: Inverted, lpips: Lpips) -> Numbers:
    """Of each example how like it what was found is."""
    rows: Numbers = [{"client": one.client, "from": one.source} for _ in one.true]
    if one.images is None:
        columns: dict[str, Tensor] = {"mse": mse(one.found, one.true), "blind_mse": mse(one.blind, one.true)}
    else:
        true, found, blind = one.images
        columns = {"mse": mse(found, true), "psnr": psnr(found, true), "ssim": ssim(found, true)}
        columns |= {"blind_ssim": ssim(blind, true)}
        if true.shape[1] in (1, 3):
            columns[lpips.name] = lpips(found, true)
    for name, values in columns.items():
        for row, value in zip(rows, values.tolist(), strict=True):
            row[name] = value
    return rows


def _of_images(rows: Numbers, found: Sequence[Inverted], lpips: str) -> str:
    where = f"Features, by {_sources(one.source for one in found)}:"
    if "ssim" not in rows[0]:
        error, blind = (fmean(row[name] for row in rows) for name in ("mse", "blind_mse"))
        return f"{where} mean squared error {error:.3g} ({blind:.3g} of the mean input), of {len(rows)} examples."
    means = {name: fmean(row[name] for row in rows) for name in ("ssim", "blind_ssim", "mse", "psnr")}
    more = f", {lpips} {fmean(row[lpips] for row in rows):.3f}" if lpips in rows[0] else ""
    return (
        f"{where} SSIM {means['ssim']:.2f} ({means['blind_ssim']:.2f} of the mean image), MSE {means['mse']:.4f}, PSNR"
        f" {means['psnr']:.1f} dB{more}, of {len(rows)} images."
    )


def _pictures(found: Sequence[Inverted]) -> dict[str, NDArray[Any]]:
    shown = [one.images for one in found if one.images is not None and one.true.shape[1] in (1, 3)]
    if not shown or len({images[0].shape[1:] for images in shown}) > 1:
        return {}
    true, made, _ = (torch.cat(parts)[:_SHOWN].numpy() for parts in zip(*shown, strict=True))
    return {"the clients' examples": true, "what was made of their features": made}


def _sources(found: Iterable[str]) -> str:
    return " and ".join(name for name, _ in Counter(found).most_common())


def _clients(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"
