"""`toy.Model` on DTensors."""

import torch
import toy
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def dtensor_model(mesh, **kwargs):
    """Blocks on batch-sharded DTensors, parameters replicated."""
    model = toy.make_model(**kwargs)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(param.data, mesh, [Replicate()])))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()]))
    return model


def run_dtensor(model, mesh, batch):
    tokens = toy.make_tokens(batch=batch)
    h = distribute_tensor(torch.nn.functional.one_hot(tokens, toy.DIM * 2).float()[..., : toy.DIM], mesh, [Shard(0)])
    h = (h * 1).requires_grad_()  # the shard itself is a view of a padded buffer
    for i, block in enumerate(model.layers.values()):
        h = block(model.between(i, h), model.rope)
    return (h * h).sum()
