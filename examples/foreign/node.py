"""A node of a Potluck federation without PyTorch and without Potluck, for any model that fits and predicts.

It needs flwr, cryptography, numpy and safetensors. The files beside this one give it models. docs/concepts/wire.md
specifies what it says and hears; docs/guides/without-pytorch.md shows its use.

A model has `fit(x, targets, weight)`, where targets (n, classes) are distributions and weight (n,) is how much each
example counts, and `predict_proba(x)`, which returns (n, classes). It need not go on from what it learned before: each
call of `fit` has all that the client is to know then. So one fit takes the place of the methods' epochs and optimisers,
and in FedMD and DS-FL the public examples with their labels and the client's own examples are learned together, each
with half of the weight, where the papers learn one after the other.
"""

import argparse
import hashlib
import json
import pickle
import re
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supernode.fleet_http_connection import http_request_response
from safetensors.numpy import load, save

VERSION = 5  # of the wire
METHODS = ("dsfl", "fd", "fedmd", "local")
HEEDED = {"pretrain", "gamma"}  # options of theirs, at any value
ONLY = {"public_labels": False, "average": "probabilities", "exchanged": "probabilities"}  # at this value alone
REPLACED = {"training", "digestion", "digest_loss", "distillation", "public_training"}  # by the model's own `fit`
OF_SERVERS = {"name", "public_examples", "combine", "aggregation", "temperature", "averaged", "server_training"}
SMALL, KEPT = 0.01, 8  # what is added to probabilities for logits; states, of which a round has two at most


def pack(tree):
    """A message, a dict of arrays, numbers, text and such dicts, as a payload."""
    arrays = {}

    def skeleton(node):
        if isinstance(node, np.ndarray):
            arrays[str(len(arrays))] = np.asarray(node, order="C")
            return {"tensor": len(arrays) - 1}
        if isinstance(node, dict):
            return {"dict": [[key, skeleton(child)] for key, child in node.items()]}
        return {"value": node}

    return save(arrays, {"potluck": json.dumps(skeleton(tree))})  # which fills the arrays first


def unpack(payload):
    """The message in a payload."""
    arrays, length = load(payload), int.from_bytes(payload[:8], "little")

    def grown(node):
        ((kind, content),) = node.items()
        if kind == "dict":
            return {key: grown(child) for key, child in content}
        return arrays[str(content)] if kind == "tensor" else content

    return grown(json.loads(json.loads(payload[8 : 8 + length])["__metadata__"]["potluck"]))


def wrap(header, payload=b""):
    """An envelope as Flower's records."""
    records = RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": json.dumps(header)})})
    if payload:
        packed = Array(dtype="uint8", shape=(len(payload),), stype="potluck.packed", data=payload)
        records["payload"] = ArrayRecord({"packed": packed})
    return records


def unwrap(records):
    """Header and payload of an envelope."""
    if (version := records["potluck"]["version"]) != VERSION:
        raise ValueError(f"the server speaks version {version} of the wire, this node {VERSION}")
    return json.loads(records["potluck"]["words"]), records["payload"]["packed"].data if "payload" in records else b""


class Client:
    """The client's half of the methods; a handler takes a message and returns its reply and the losses of its fits."""

    def __init__(self, method, classes, data, model, fitted, rows):
        self.method, self.classes, self.data = method, classes, data
        self.model, self.fitted, self.rows = model, fitted, rows
        self.targets, self.weight = np.eye(classes)[data["y_train"]], np.ones(len(data["y_train"]))

    def predict(self, x):
        """Distributions (n, classes); uniform ones before anything is learned."""
        found = self.model.predict_proba(x) if self.fitted else np.full((len(x), self.classes), 1 / self.classes)
        return np.asarray(found, np.float32)

    def learn(self, targets, weight, rows=(), labels=None):
        """Fit to own examples, and to public ones with soft labels; return the mean loss of own ones, in a list."""
        x, y = self.data["x_train"], self.data["y_train"]
        given = x, targets, weight
        if len(rows):
            taught = self.data["x_public"][rows], labels, np.full(len(rows), weight.sum() / len(rows))
            given = [np.concatenate(pair) for pair in zip(taught, given, strict=True)]
        self.model.fit(*given)
        self.fitted = True
        loss = float(-np.log(self.predict(x)[np.arange(len(y)), y] + 1e-9).mean())
        return [loss] if np.isfinite(loss) else []  # a header has no other numbers

    def local_update(self, message):
        """The only handler of local training, DS-FL and FD."""
        if self.method["name"] == "local":
            return {}, self.learn(self.targets, self.weight)
        if self.method["name"] == "dsfl":
            losses = self.learn(self.targets, self.weight, **message.get("lesson", {}))
            return {"predictions": self.predict(self.data["x_public"][message["rows"]])}, losses
        y, table, targets, weight = self.data["y_train"], message.get("averages"), self.targets, self.weight
        if table is not None:  # the cross-entropies to y and, times gamma, to the average are one, to a mixture
            share = self.method["gamma"] * table["known"][y]
            targets = (targets + share[:, None] * table["means"][y]) / (1 + share[:, None])
            weight = 1 + share
        losses, found, present = self.learn(targets, weight), self.predict(self.data["x_train"]), np.unique(y)
        return {"means": np.stack([found[y == label].mean(0) for label in present]), "labels": present}, losses

    def score_public(self, message):
        """FedMD's first handler: logits of the round's public examples, each row around 0."""
        losses = self.learn(self.targets, self.weight) if self.method["pretrain"] and not self.fitted else []
        self.rows = message["rows"]
        logs = np.log(self.predict(self.data["x_public"][self.rows]) + np.float32(SMALL))
        return {"logits": logs - logs.mean(1, keepdims=True)}, losses

    def digest_and_revisit(self, message):
        """FedMD's second handler: learn the consensus, as a distribution, and own labels."""
        shares = np.exp(message["consensus"] - message["consensus"].max(1, keepdims=True))
        return {}, self.learn(self.targets, self.weight, self.rows, shares / shares.sum(1, keepdims=True))

    def sums(self, part):
        """The sums of an evaluation: how many examples there are of each class, by the class that is predicted."""
        table = np.zeros((self.classes, self.classes), np.int64)
        np.add.at(table, (self.data[f"y_{part}"], self.predict(self.data[f"x_{part}"]).argmax(1)), 1)
        return {"confusion": table}


def check(header, digest):
    """Refuse what this node could not do as it is asked, before anything is learned."""
    method, federation = header["experiment"]["method"], header["experiment"]["federation"]
    if method["name"] not in METHODS or header["task"] != "classification" or header["classes"]["count"] > 100:
        raise ValueError(f"this node knows {', '.join(METHODS)}, and classification of up to 100 classes")
    for name, value in method.items():
        if name not in REPLACED | OF_SERVERS | HEEDED and (name not in ONLY or value != ONLY[name]):
            raise ValueError(f"method.{name} = {value!r}: this node does not know it; leave it at its default")
    if federation.get("metrics") or "scores" in (federation.get("task") or ()):
        raise ValueError("this node counts a confusion matrix; leave out federation.metrics and federation.task.scores")
    if method["name"] in ("fedmd", "dsfl") and header["public"] != digest:
        raise ValueError("the server has other public examples than this node's file; write it anew: potluck public")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", header["run"]):
        raise ValueError(f"the name of a run is {header['run'][:80]!r}; expected letters, digits, '-', '_' and '.'")


class Node:
    """Answers a server's messages.

    Args:
        label: names the kind of model in records.
        make: makes a model for a number of classes.
        own: arrays x_train, y_train, x_test, y_test, and if classes have names, classes.
        common: what `potluck public` wrote; empty without public examples.
        folder: for states.
    """

    def __init__(self, label, make, own, common, folder):
        self.label, self.make, self.own, self.common, self.folder = label, make, own, common, folder
        self.names = own["classes"].tolist() if "classes" in own else None

    def reply(self, asked):
        """The reply to a message of Flower's."""
        try:
            header, payload = unwrap(asked.content)
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=asked)
        return Message(wrap(*self.answer(asked.metadata.message_type, header, payload)), reply_to=asked)

    def answer(self, kind, header, payload):
        """Header and payload of the answer to a message of this kind."""
        if kind == "query.refusal":
            print(f"this node takes no part: {header['why']!r}", file=sys.stderr)
            return {}, b""
        try:
            check(header, str(self.common.get("digest")))
            data = self.data(header["classes"])
            return self.work(header, payload, data) if kind == "train.job" else (self.introduction(header, data), b"")
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            failure = {"handler": "", "reason": why, "trace": traceback.format_exc(), "kind": "error"}
            refusing = {"client": header["client"], "failure": failure} if kind == "train.job" else {"refusal": why}
            return refusing, b""

    def data(self, classes):
        """All arrays, with the federation's numbers for its classes."""
        names, own = classes["names"] or (), self.names or ()
        if strange := [name for name in own if name not in names]:
            raise ValueError(f"class {strange[0]!r} is none of the server's: {', '.join(names) or 'they have numbers'}")
        number = np.array([names.index(name) for name in own] or range(classes["count"]))
        y_train, y_own = (number[self.own[part]] for part in ("y_train", "y_test"))
        arrays = {"x_train": self.own["x_train"], "y_train": y_train, "x_own": self.own["x_test"], "y_own": y_own}
        return {**self.common, **arrays}

    def introduction(self, header, data):
        """What the server is told of this node: no tensors, since there is no network."""
        network = {"shapes": {}, "dtypes": {}, "parameters": [], "frozen": [], "outputs": None}
        counts = {"train": len(data["y_train"]), "validation": 0, "test": len(data["y_own"])}
        form = {"input_shape": list(data["x_train"].shape[1:]), "num_classes": header["classes"]["count"]}
        return {"architecture": self.label, "capacity": 1.0, **network, **counts, **form, "classes": self.names}

    def work(self, header, payload, data):
        """Carry out a job, a handler's call or an evaluation, from the state that the server names."""
        method, folder, record = header["experiment"]["method"], self.folder / header["run"], header["record"]
        classes, who, state = header["classes"]["count"], header["client"], (None, False, None)
        if record is not None:
            if not re.fullmatch("[0-9a-f]{32}", record) or not (folder / record).is_file():
                raise ValueError("the client's state that the server names is missing")
            state = pickle.loads((folder / record).read_bytes())
        client = Client(method, classes, data, state[0] or self.make(classes), *state[1:])
        if "handler" not in header:
            sums = {part: client.sums(part) for part in header["parts"] if len(data.get(f"y_{part}", ()))}
            name = hashlib.blake2b(f"{who} {record}".encode(), digest_size=16).hexdigest()
            return {"client": who, "result": {"model": name}}, pack(sums)
        if header["handler"] not in ("local_update", "score_public", "digest_and_revisit"):
            raise ValueError(f"there is no handler {header['handler'][:80]!r}")
        reply, losses = getattr(client, header["handler"])(unpack(payload))
        record = self.keep(folder, pickle.dumps((client.model, client.fitted, client.rows)))
        return {"client": who, "answer": {"losses": losses, "record": record}}, pack(reply)

    def keep(self, folder, state):
        """Write a state, remove the oldest, and return its name."""
        name = hashlib.blake2b(state, digest_size=16).hexdigest()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "new").write_bytes(state)
        (folder / "new").replace(folder / name)
        for old in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-KEPT]:
            old.unlink()
        return name


def take_part(address, keys, node):
    """Answer messages until the connection ends."""
    key = load_ssh_private_key((keys / "node.key").read_bytes(), None)
    trust = (keys / "ca.crt").read_bytes()
    with http_request_response(address, False, trust, (key, key.public_key())) as connection:
        _, receive, send, _, _, pull, push, confirm = connection
        print("connected", file=sys.stderr)
        while True:
            while (found := receive()) is None:
                time.sleep(2.0)
            run, tree = found[0].metadata.run_id, found[1]
            asked = pull_and_inflate_object_from_tree(tree, partial(pull, run), partial(confirm, run))
            asked.metadata.__dict__["_message_id"] = tree.object_id  # Flower sends it beside the message
            began, reply = time.monotonic(), node.reply(asked)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), time.monotonic() - began)
            push_objects(get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=wanted)


def main(label, make):
    """Take part with a kind of model until interrupted."""
    words = argparse.ArgumentParser(description=f"A node of a Potluck federation: {label}.")
    words.add_argument("address", help="HOST:PORT of the server")
    words.add_argument("--keys", type=Path, required=True, help="this node's folder, made by `potluck keys`")
    words.add_argument("--data", type=Path, required=True, help=".npz of x_train, y_train, x_test, y_test, classes")
    words.add_argument("--public", type=Path, help="what `potluck public` wrote")
    words.add_argument("--state", type=Path, default=Path("node"), help="folder for states, nobody else's to write")
    given = words.parse_args()
    own, common = (dict(np.load(place)) if place else {} for place in (given.data, given.public))
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: sys.exit())  # so that the server hears that this node leaves
    while True:
        take_part(given.address, given.keys, Node(label, make, own, common, given.state))
        time.sleep(10.0)  # the connection has ended, and Flower said why
