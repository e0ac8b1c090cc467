"""Potluck: federated learning where every client brings its own model."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application configures logging

# Names are imported when they are first used: `import potluck` and `potluck --help` must not wait for torch.
_HOMES = {
    "Comparison": "api.compare",
    "compare": "api.compare",
    "Exported": "api.export",
    "report": "api.compare",
    "RunResult": "api.result",
    "open_run": "api.result",
    "resume": "api.run",
    "run": "api.run",
    "BATCH_NORMS": "core.batchnorm",
    "batch_norms": "core.batchnorm",
    "keep_statistics": "core.batchnorm",
    "measure_statistics": "core.batchnorm",
    "norms_of": "core.batchnorm",
    "ConfigError": "core.errors",
    "PotluckError": "core.errors",
    "PotluckWarning": "core.errors",
    "Batch": "core.examples",
    "call_with": "core.calling",
    "Examples": "core.examples",
    "ClientId": "core.federation",
    "Criterion": "core.federation",
    "Federation": "core.federation",
    "Member": "core.federation",
    "Site": "core.federation",
    "above": "core.fields",
    "at_least": "core.fields",
    "at_most": "core.fields",
    "below": "core.fields",
    "require": "core.fields",
    "Extras": "core.fit",
    "Fit": "core.fit",
    "LocalTraining": "core.fit",
    "Observed": "core.fit",
    "Request": "core.fit",
    "ServerTraining": "core.fit",
    "predict": "core.inference",
    "Message": "core.message",
    "ClientWork": "core.method",
    "Method": "core.method",
    "Releases": "core.method",
    "on_client": "core.method",
    "mode": "core.modes",
    "Need": "core.needs",
    "Gradient": "core.requests",
    "Measure": "core.requests",
    "Predict": "core.requests",
    "Key": "core.rng",
    "fold_in": "core.rng",
    "isolated": "core.rng",
    "Client": "core.roles",
    "Cohort": "core.roles",
    "Replies": "core.roles",
    "Server": "core.roles",
    "Scale": "core.scale",
    "ClassCounts": "core.schema",
    "LARGEST": "core.schema",
    "Labels": "core.schema",
    "Probabilities": "core.schema",
    "Schema": "core.schema",
    "UpTo": "core.schema",
    "booleans": "core.schema",
    "count": "core.schema",
    "floats": "core.schema",
    "like": "core.schema",
    "number": "core.schema",
    "optional": "core.schema",
    "some_of": "core.schema",
    "Channels": "core.slicing",
    "Weights": "core.weights",
    "buffers_of": "core.weights",
    "frozen_names": "core.weights",
    "layout": "core.weights",
    "learnt_of": "core.weights",
    "load": "core.weights",
    "mean": "core.weights",
    "mean_where_present": "core.weights",
    "minus": "core.weights",
    "outline": "core.weights",
    "parameters_of": "core.weights",
    "pick": "core.weights",
    "plus": "core.weights",
    "weights_of": "core.weights",
    "zeros_like": "core.weights",
    "RunConfig": "experiment.config",
    "Observer": "experiment.observers",
    "Run": "experiment.run",
    "get_method": "methods",
    "list_methods": "methods",
    "Blocks": "models.contract",
    "Exit": "models.contract",
    "GlobalPool": "models.contract",
    "StagedNet": "models.contract",
    "blocks": "models.contract",
    "classifier_names": "models.contract",
    "classifier_of": "models.contract",
    "feature_shapes": "models.contract",
    "intermediate_names": "models.contract",
    "linear_exit": "models.contract",
    "of_depth": "models.contract",
    "place_shapes": "models.contract",
    "split": "models.contract",
    "with_exits": "models.contract",
    "Narrowing": "parts.channels",
    "CrossLayer": "parts.crosslayer",
    "InCo": "parts.crosslayer",
    "ConditionalVAE": "parts.cvae",
    "VAELoss": "parts.cvae",
    "kl_to_standard": "parts.cvae",
    "server_vae": "parts.cvae",
    "DepthWise": "parts.depthwise",
    "in_stages": "models.contract",
    "staged": "models.contract",
    "bottleneck_exit": "parts.exits",
    "convolutional_exit": "parts.exits",
    "leading_names": "parts.exits",
    "leading_share": "parts.exits",
    "new_exits": "parts.exits",
    "FeatureLoss": "parts.features",
    "FeaturePlace": "parts.features",
    "ObservingLoss": "parts.features",
    "PairStore": "parts.features",
    "common_width": "parts.features",
    "drawn": "parts.features",
    "expected_pairs": "parts.features",
    "feature_shape": "parts.features",
    "signatures": "parts.features",
    "with_pairs": "parts.features",
    "Generator": "parts.generator",
    "GeneratorLoss": "parts.generator",
    "check_heads": "parts.generator",
    "likeness": "parts.generator",
    "sent_heads": "parts.generator",
    "COMMON_HEAD": "parts.heads",
    "COMMON_WIDTH": "parts.heads",
    "PLAIN_HEAD": "parts.heads",
    "SERVERS_HEAD": "parts.heads",
    "TRAINED_HEAD": "parts.heads",
    "client_net": "parts.heads",
    "head_of": "parts.heads",
    "InputGenerator": "parts.inputs",
    "Link": "parts.links",
    "SkipLink": "parts.links",
    "DynamicLoss": "parts.losses",
    "distillation": "parts.losses",
    "masked_cross_entropy": "parts.losses",
    "soft_cross_entropy": "parts.losses",
    "squared_distance": "parts.losses",
    "Factored": "parts.lowrank",
    "factored": "parts.lowrank",
    "factored_like": "parts.lowrank",
    "multiplied": "parts.lowrank",
    "Mean": "parts.means",
    "mean_of": "parts.means",
    "MemoryModel": "parts.memory",
    "Piece": "parts.memory",
    "put_back": "parts.moving",
    "Nested": "parts.nested",
    "NestedWidths": "parts.nested",
    "by_width": "parts.nested",
    "of_width": "parts.nested",
    "Kind": "parts.noise",
    "noise_examples": "parts.noise",
    "effective_steps": "parts.normalised",
    "unmixed": "parts.precision",
    "FeaturePrivacy": "parts.privacy",
    "ReleasesFeatures": "parts.privacy",
    "Reconcile": "parts.projection",
    "NearestPrototype": "parts.prototypes",
    "PredictsByPrototypes": "parts.prototypes",
    "PrototypeLoss": "parts.prototypes",
    "ReplayLoss": "parts.prototypes",
    "Rows": "parts.prototypes",
    "Table": "parts.prototypes",
    "averages": "parts.prototypes",
    "distance": "parts.prototypes",
    "expected_prototypes": "parts.prototypes",
    "means_by_class": "parts.prototypes",
    "measured": "parts.prototypes",
    "one_each": "parts.prototypes",
    "reported": "parts.prototypes",
    "stored": "parts.prototypes",
    "as_distributions": "parts.public",
    "consensus": "parts.public",
    "drawn_rows": "parts.public",
    "lesson_of_rows": "parts.public",
    "predict_rows": "parts.public",
    "public_of": "parts.public",
    "soft_labels_loss": "parts.public",
    "soft_lesson": "parts.public",
    "GroupWeights": "parts.sharing",
    "SharesWeights": "parts.sharing",
    "Sharing": "parts.sharing",
    "norm": "parts.sharing",
    "CoverageMean": "parts.submodels",
    "SubModel": "parts.submodels",
    "leading": "parts.submodels",
    "mean_where_covered": "parts.submodels",
    "packed": "parts.submodels",
    "put": "parts.submodels",
    "select": "parts.submodels",
    "unpacked": "parts.submodels",
    "whole": "parts.submodels",
    "EnsembleLoss": "parts.teaching",
    "MutualLoss": "parts.teaching",
    "by_batch_statistics": "parts.teaching",
    "WidthSlices": "parts.width",
    "level_within": "parts.width",
    "mean_statistics": "parts.width",
    "warn_below": "parts.width",
    "with_scaler": "parts.width",
}

if TYPE_CHECKING:
    from potluck.api.compare import Comparison as Comparison
    from potluck.api.compare import compare as compare
    from potluck.api.compare import report as report
    from potluck.api.export import Exported as Exported
    from potluck.api.result import RunResult as RunResult
    from potluck.api.result import open_run as open_run
    from potluck.api.run import resume as resume
    from potluck.api.run import run as run
    from potluck.core.batchnorm import BATCH_NORMS as BATCH_NORMS
    from potluck.core.batchnorm import batch_norms as batch_norms
    from potluck.core.batchnorm import keep_statistics as keep_statistics
    from potluck.core.batchnorm import measure_statistics as measure_statistics
    from potluck.core.batchnorm import norms_of as norms_of
    from potluck.core.calling import call_with as call_with
    from potluck.core.errors import ConfigError as ConfigError
    from potluck.core.errors import PotluckError as PotluckError
    from potluck.core.errors import PotluckWarning as PotluckWarning
    from potluck.core.examples import Batch as Batch
    from potluck.core.examples import Examples as Examples
    from potluck.core.federation import ClientId as ClientId
    from potluck.core.federation import Criterion as Criterion
    from potluck.core.federation import Federation as Federation
    from potluck.core.federation import Member as Member
    from potluck.core.federation import Site as Site
    from potluck.core.fields import above as above
    from potluck.core.fields import at_least as at_least
    from potluck.core.fields import at_most as at_most
    from potluck.core.fields import below as below
    from potluck.core.fields import require as require
    from potluck.core.fit import Extras as Extras
    from potluck.core.fit import Fit as Fit
    from potluck.core.fit import LocalTraining as LocalTraining
    from potluck.core.fit import Observed as Observed
    from potluck.core.fit import Request as Request
    from potluck.core.fit import ServerTraining as ServerTraining
    from potluck.core.inference import predict as predict
    from potluck.core.message import Message as Message
    from potluck.core.method import ClientWork as ClientWork
    from potluck.core.method import Method as Method
    from potluck.core.method import Releases as Releases
    from potluck.core.method import on_client as on_client
    from potluck.core.modes import mode as mode
    from potluck.core.needs import Need as Need
    from potluck.core.requests import Gradient as Gradient
    from potluck.core.requests import Measure as Measure
    from potluck.core.requests import Predict as Predict
    from potluck.core.rng import Key as Key
    from potluck.core.rng import fold_in as fold_in
    from potluck.core.rng import isolated as isolated
    from potluck.core.roles import Client as Client
    from potluck.core.roles import Cohort as Cohort
    from potluck.core.roles import Replies as Replies
    from potluck.core.roles import Server as Server
    from potluck.core.scale import Scale as Scale
    from potluck.core.schema import LARGEST as LARGEST
    from potluck.core.schema import ClassCounts as ClassCounts
    from potluck.core.schema import Labels as Labels
    from potluck.core.schema import Probabilities as Probabilities
    from potluck.core.schema import Schema as Schema
    from potluck.core.schema import UpTo as UpTo
    from potluck.core.schema import booleans as booleans
    from potluck.core.schema import count as count
    from potluck.core.schema import floats as floats
    from potluck.core.schema import like as like
    from potluck.core.schema import number as number
    from potluck.core.schema import optional as optional
    from potluck.core.schema import some_of as some_of
    from potluck.core.slicing import Channels as Channels
    from potluck.core.weights import Weights as Weights
    from potluck.core.weights import buffers_of as buffers_of
    from potluck.core.weights import frozen_names as frozen_names
    from potluck.core.weights import layout as layout
    from potluck.core.weights import learnt_of as learnt_of
    from potluck.core.weights import load as load
    from potluck.core.weights import mean as mean
    from potluck.core.weights import mean_where_present as mean_where_present
    from potluck.core.weights import minus as minus
    from potluck.core.weights import outline as outline
    from potluck.core.weights import parameters_of as parameters_of
    from potluck.core.weights import pick as pick
    from potluck.core.weights import plus as plus
    from potluck.core.weights import weights_of as weights_of
    from potluck.core.weights import zeros_like as zeros_like
    from potluck.experiment.config import RunConfig as RunConfig
    from potluck.experiment.observers import Observer as Observer
    from potluck.experiment.run import Run as Run
    from potluck.methods import get_method as get_method
    from potluck.methods import list_methods as list_methods
    from potluck.models.contract import Blocks as Blocks
    from potluck.models.contract import Exit as Exit
    from potluck.models.contract import GlobalPool as GlobalPool
    from potluck.models.contract import StagedNet as StagedNet
    from potluck.models.contract import blocks as blocks
    from potluck.models.contract import classifier_names as classifier_names
    from potluck.models.contract import classifier_of as classifier_of
    from potluck.models.contract import feature_shapes as feature_shapes
    from potluck.models.contract import in_stages as in_stages
    from potluck.models.contract import intermediate_names as intermediate_names
    from potluck.models.contract import linear_exit as linear_exit
    from potluck.models.contract import of_depth as of_depth
    from potluck.models.contract import place_shapes as place_shapes
    from potluck.models.contract import split as split
    from potluck.models.contract import staged as staged
    from potluck.models.contract import with_exits as with_exits
    from potluck.parts.channels import Narrowing as Narrowing
    from potluck.parts.crosslayer import CrossLayer as CrossLayer
    from potluck.parts.crosslayer import InCo as InCo
    from potluck.parts.cvae import ConditionalVAE as ConditionalVAE
    from potluck.parts.cvae import VAELoss as VAELoss
    from potluck.parts.cvae import kl_to_standard as kl_to_standard
    from potluck.parts.cvae import server_vae as server_vae
    from potluck.parts.depthwise import DepthWise as DepthWise
    from potluck.parts.exits import bottleneck_exit as bottleneck_exit
    from potluck.parts.exits import convolutional_exit as convolutional_exit
    from potluck.parts.exits import leading_names as leading_names
    from potluck.parts.exits import leading_share as leading_share
    from potluck.parts.exits import new_exits as new_exits
    from potluck.parts.features import FeatureLoss as FeatureLoss
    from potluck.parts.features import FeaturePlace as FeaturePlace
    from potluck.parts.features import ObservingLoss as ObservingLoss
    from potluck.parts.features import PairStore as PairStore
    from potluck.parts.features import common_width as common_width
    from potluck.parts.features import drawn as drawn
    from potluck.parts.features import expected_pairs as expected_pairs
    from potluck.parts.features import feature_shape as feature_shape
    from potluck.parts.features import signatures as signatures
    from potluck.parts.features import with_pairs as with_pairs
    from potluck.parts.generator import Generator as Generator
    from potluck.parts.generator import GeneratorLoss as GeneratorLoss
    from potluck.parts.generator import check_heads as check_heads
    from potluck.parts.generator import likeness as likeness
    from potluck.parts.generator import sent_heads as sent_heads
    from potluck.parts.heads import COMMON_HEAD as COMMON_HEAD
    from potluck.parts.heads import COMMON_WIDTH as COMMON_WIDTH
    from potluck.parts.heads import PLAIN_HEAD as PLAIN_HEAD
    from potluck.parts.heads import SERVERS_HEAD as SERVERS_HEAD
    from potluck.parts.heads import TRAINED_HEAD as TRAINED_HEAD
    from potluck.parts.heads import client_net as client_net
    from potluck.parts.heads import head_of as head_of
    from potluck.parts.inputs import InputGenerator as InputGenerator
    from potluck.parts.links import Link as Link
    from potluck.parts.links import SkipLink as SkipLink
    from potluck.parts.losses import DynamicLoss as DynamicLoss
    from potluck.parts.losses import distillation as distillation
    from potluck.parts.losses import masked_cross_entropy as masked_cross_entropy
    from potluck.parts.losses import soft_cross_entropy as soft_cross_entropy
    from potluck.parts.losses import squared_distance as squared_distance
    from potluck.parts.lowrank import Factored as Factored
    from potluck.parts.lowrank import factored as factored
    from potluck.parts.lowrank import factored_like as factored_like
    from potluck.parts.lowrank import multiplied as multiplied
    from potluck.parts.means import Mean as Mean
    from potluck.parts.means import mean_of as mean_of
    from potluck.parts.memory import MemoryModel as MemoryModel
    from potluck.parts.memory import Piece as Piece
    from potluck.parts.moving import put_back as put_back
    from potluck.parts.nested import Nested as Nested
    from potluck.parts.nested import NestedWidths as NestedWidths
    from potluck.parts.nested import by_width as by_width
    from potluck.parts.nested import of_width as of_width
    from potluck.parts.noise import Kind as Kind
    from potluck.parts.noise import noise_examples as noise_examples
    from potluck.parts.normalised import effective_steps as effective_steps
    from potluck.parts.precision import unmixed as unmixed
    from potluck.parts.privacy import FeaturePrivacy as FeaturePrivacy
    from potluck.parts.privacy import ReleasesFeatures as ReleasesFeatures
    from potluck.parts.projection import Reconcile as Reconcile
    from potluck.parts.prototypes import NearestPrototype as NearestPrototype
    from potluck.parts.prototypes import PredictsByPrototypes as PredictsByPrototypes
    from potluck.parts.prototypes import PrototypeLoss as PrototypeLoss
    from potluck.parts.prototypes import ReplayLoss as ReplayLoss
    from potluck.parts.prototypes import Rows as Rows
    from potluck.parts.prototypes import Table as Table
    from potluck.parts.prototypes import averages as averages
    from potluck.parts.prototypes import distance as distance
    from potluck.parts.prototypes import expected_prototypes as expected_prototypes
    from potluck.parts.prototypes import means_by_class as means_by_class
    from potluck.parts.prototypes import measured as measured
    from potluck.parts.prototypes import one_each as one_each
    from potluck.parts.prototypes import reported as reported
    from potluck.parts.prototypes import stored as stored
    from potluck.parts.public import as_distributions as as_distributions
    from potluck.parts.public import consensus as consensus
    from potluck.parts.public import drawn_rows as drawn_rows
    from potluck.parts.public import lesson_of_rows as lesson_of_rows
    from potluck.parts.public import predict_rows as predict_rows
    from potluck.parts.public import public_of as public_of
    from potluck.parts.public import soft_labels_loss as soft_labels_loss
    from potluck.parts.public import soft_lesson as soft_lesson
    from potluck.parts.sharing import GroupWeights as GroupWeights
    from potluck.parts.sharing import SharesWeights as SharesWeights
    from potluck.parts.sharing import Sharing as Sharing
    from potluck.parts.sharing import norm as norm
    from potluck.parts.submodels import CoverageMean as CoverageMean
    from potluck.parts.submodels import SubModel as SubModel
    from potluck.parts.submodels import leading as leading
    from potluck.parts.submodels import mean_where_covered as mean_where_covered
    from potluck.parts.submodels import packed as packed
    from potluck.parts.submodels import put as put
    from potluck.parts.submodels import select as select
    from potluck.parts.submodels import unpacked as unpacked
    from potluck.parts.submodels import whole as whole
    from potluck.parts.teaching import EnsembleLoss as EnsembleLoss
    from potluck.parts.teaching import MutualLoss as MutualLoss
    from potluck.parts.teaching import by_batch_statistics as by_batch_statistics
    from potluck.parts.width import WidthSlices as WidthSlices
    from potluck.parts.width import level_within as level_within
    from potluck.parts.width import mean_statistics as mean_statistics
    from potluck.parts.width import warn_below as warn_below
    from potluck.parts.width import with_scaler as with_scaler


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    return getattr(importlib.import_module(f"potluck.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
