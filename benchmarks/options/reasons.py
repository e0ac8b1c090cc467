"""Why an option may change nothing on the toy federation, or two runs differ that otherwise come to the same."""

from fnmatch import fnmatchcase

REASONS: dict[str, str] = {
    # Combining what three clients send.
    "*: *combine.rule=trimmed": "a fifth of three clients, rounded down, is none, so trimmed is the unweighted mean",
    "*: *combine.rule=multi_krum": "a fifth of three clients, rounded down, is none, so all three are averaged",
    "fd: combine.rule=median": "a class is averaged over the two others at most, and the median of two is their mean",
    "fd: *trim=0.4 beside*": "0.4 of the two others, rounded down, is none",
    "rhfl: *trim=0.4 beside*": "0.4 of the two others, rounded down, is none",
    "fedh2l: *trim=0.4 beside*": "0.4 of the two others, rounded down, is none",
    "fedaux: *trim=0.4 beside*": "0.4 of the two clients of an architecture, rounded down, is none",
    "inclusivefl: *trim=0.4 beside*": "0.4 of the two clients of an architecture, rounded down, is none",
    "fedftg: *trim=0.4 beside*": "0.4 of the two clients of an architecture, rounded down, is none",
    "cronus: combine.*": "it counts with aggregation=rule alone; beside that it is tried, too",
    "cronus: combine.trim=0.4 beside combine.*": "it counts with aggregation=rule alone; beside that it is tried, too",
    "cronus: outliers=*": "of three clients the default drops none, nor does less; beside a small variance more does",
    "cronus: variance=*": "of three clients the default of outliers drops none; beside more outliers it is tried, too",
    # What the toy networks and data do not have.
    "*fedepth: partial=bypass": "no client here is too weak for a block",
    "fedepth: link=average": "features that are no maps have one position, which both links take",
    "fedin: noise_*": "it counts with noise alone; beside that it is tried, too",
    "fedtgp: margin=farthest": "both distances are above the threshold; beside a larger one it is tried, too",
    "hypemefed: rank=?*0": "no layer here has as large a rank; a smaller one is tried, too",
    "fedin: granularity=*": "it counts with rule=exact alone; beside that it is tried, too",
    "flanc: channels=0.0625": "of eight channels it is half a one, and one is the least",
    "inco*: inco.granularity=tensor": "no layer here has kernels; with incoavg it is tried on images",
    "inco*: inco.clip=0.*": "no entry of an update here is as large; a smaller limit is tried, too",
    "inco*: inco.cap=10.0": "no theta here is as large; a smaller limit is tried, too",
    # Three rounds of three clients.
    "fedgkd: buffer=4": "three rounds leave no more than two models before the last",
    "fedhe: memory=4": "in three rounds a client reports no more often than that",
    "fedhe: warmup=0": "before the first reports there are no averages to send",
    "?elo: warmup_rounds=0": "before the first reports there are no averages to send",
    "fiarse: grow_every=*": "it counts with a ladder alone; beside one it is tried, too",
    "fedselect: limit=*": "it is looked at before a mask's second growth, which comes into effect in round four",
    "?elo: sharing.*": "it counts with sharing.scope=layer alone; beside that it is tried, too",
    "?elo: sharing.combine.trim=0.4 beside*": "it counts with sharing.scope=layer alone",
    "fedorion: mutual_from=0.5": "the client below 1/2 has the common architecture as its own",
    "*fedepth: buffer=false": "it says when a piece's inputs are computed, not what they are",
    "ktpfl: coefficient_lr=*": "it counts with update=projected alone; beside that it is tried, too",
    "fedfomo: peers=2": "a candidate that does not help has no weight; with larger steps it is tried, too",
    "fedfomo: epsilon=0.0": "by these draws nobody explores at 0.3 either; at 0.6 somebody does",
    "rhfl: scale=sum": "no client's loss rises here, so both are one number; with larger steps it is tried, too",
    # A training of one step, or of one round.
    "fedktl: server_training.steps=1": "an epoch is one step here",
    "fedre: server_training.steps=1": "an epoch is one step here",
    "hypemefed: server_training.steps=1": "an epoch is one step here",
    "fedktl: server_training.momentum=0.9": "of one step it is none; beside two epochs it is tried, too",
    "fedre: server_training.momentum=0.9": "of one step it is none; beside two epochs it is tried, too",
    "hypemefed: server_training.momentum=0.9": "of one step it is none; beside two epochs it is tried, too",
    "fedre: server_training.batch_size=5": "there are no more than three examples, one of each client",
    "hypemefed: server_training.batch_size=5": "there are no more than three examples, one of each client",
    "fedktl: generator_training.schedule.rule=exp*": "the generator is trained once, before round one",
    "fedmd: public_training.*schedule.rule=exp* beside public_labels=true": "it is a training of the first round alone",
    "fedmd: public_training.persist=true beside *": "it is a training of the first round alone",
    # Runs that need not come to the same.
    "*: training.persist=true in one round": "the round has several fits of one name, which have one optimiser",
    "fedl2g: combine.rule=* of three twins": "twins draw examples of their own to study",
    "fedgen: sharing.combine.rule=* of three twins": "twins draw noise of their own for the generator",
    "fccl: precision=bf16": "a last batch of four has a unit of little variance, by which BatchNorm divides rounding",
    "fedmk: precision=bf16": "a last batch of two has a unit of little variance, by which BatchNorm divides rounding",
    "fedktl: precision=bf16": "at this rate its loss is close to diverging, and what rounds differently goes apart",
    "fedproto: weighting with equally*": "it weighs by the examples of each class",
    "fjord: combine.rule=* of three twins": "twins draw widths of their own",
    "fedhe: weighting with equally*": "it weighs by the examples of each class",
    # What has no gradient, or no part.
    "feddpa: bound=0.25": "every update here is larger than both bounds, and only the sign of the gap has a gradient",
}
"""By method and option, as patterns: a sentence. Of options beside others only patterns that say so speak."""


def reason_for(method: str, option: str) -> str | None:
    """The reason for an option; None if there is none."""
    alike = {pattern: reason for pattern, reason in REASONS.items() if (" beside" in pattern) == (" beside " in option)}
    return next((reason for pattern, reason in alike.items() if fnmatchcase(f"{method}: {option}", pattern)), None)
