"""The client's side of `flower`: a module of its own, because Ray's actors import it."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from nets import build
from torch.utils.data import DataLoader
from workloads import chosen_workload

from contestants._training import datasets, train

app = ClientApp()


@app.train()
def train_on_client(message: Message, context: Context) -> Message:
    """The quickstart's: load the weights, train, send them back. An actor keeps the data once it has drawn them."""
    torch.set_num_threads(1)
    workload = chosen_workload(message.content["config"]["workload"], message.content["config"]["smoke"])
    net = build(workload.nets[0], workload.shape, workload.classes)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    examples = datasets(workload)[context.node_config["partition-id"]]
    steps = train(net, DataLoader(examples, workload.batch_size, shuffle=True), workload)
    metrics = MetricRecord({"num-examples": len(examples), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
