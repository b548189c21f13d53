"""A ClientApp as in Flower's PyTorch quickstart: data by partition, a state dict, its metrics.

Images are replaced by points of two classes, that nothing has to be fetched.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small model with its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.layers(x)


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """Training and test data of a partition."""
    g = torch.Generator().manual_seed(1000 * num_partitions + partition_id)
    y = torch.randint(0, 2, (60,), generator=g)
    x = torch.randn(60, 4, generator=g) + 1.5 * y[:, None]
    both = TensorDataset(x, y)
    train, test = (
        torch.utils.data.Subset(both, range(40)),
        torch.utils.data.Subset(both, range(40, 60)),
    )
    order = torch.Generator().manual_seed(partition_id)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, generator=order),
        DataLoader(test, batch_size=batch_size),
    )


def fit(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train; return the mean loss."""
    criterion, total, batches = nn.CrossEntropyLoss(), 0.0, 0
    optimiser = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimiser.step()
            total, batches = total + loss.item(), batches + 1
    return total / batches


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy."""
    criterion, correct, loss = nn.CrossEntropyLoss(), 0, 0.0
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            outputs = net(x)
            loss += criterion(outputs, y).item()
            correct += (outputs.argmax(1) == y).sum().item()
    return loss / len(loader), correct / len(loader.dataset)


test.__test__ = False

app = ClientApp()


def _loaders(context: Context) -> tuple[DataLoader, DataLoader]:
    return load_data(
        context.node_config["partition-id"],
        context.node_config["num-partitions"],
        context.run_config["batch-size"],
    )


def _received(msg: Message) -> Net:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model received on the partition's data."""
    model, (loader, _) = _received(msg), _loaders(context)
    epochs = context.run_config["local-epochs"]
    loss = fit(model, loader, epochs, msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate it there."""
    _, loader = _loaders(context)
    loss, accuracy = test(_received(msg), loader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def initial() -> ArrayRecord:
    """The model to start from."""
    torch.manual_seed(0)
    return ArrayRecord(Net().state_dict())
