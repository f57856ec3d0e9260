#!/usr/bin/env bash
# torch-uncertainty 0.13.0 and torchvision 0.29.1, on torch 2.14.1
#
# torch-uncertainty's deep_ensembles(net, num_estimators=M) copies the network M times and gives
# each copy new weights with every reset_parameters() that it finds. What has no such method keeps
# the values of net: attention of nn.MultiheadAttention (its method is called _reset_parameters),
# position embeddings, layer scales. And reset_parameters() is the layer's default, not what the
# architecture had chosen.
# Seen, members compared with each other and with net:
#   vit_b_32       24 % of the weights equal: queries, keys and values of all 12 layers, positions
#   swin_t         the tables of relative positions equal
#   resnet18       nothing equal; first convolution: standard deviation 0.048, net's 0.025
#   convnext_tiny  first convolution 0.083, net's 0.020
# Why it matters: members that start alike in a quarter of their weights are not the independent
# initialisations that deep ensembles rest on, and the single network beside them starts from
# other weights than they do. For a trained ViT, members get its attention and random weights
# around it (resetting is the default). Build each member anew, and pass the list.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 torchvision==0.29.1 numpy==2.4.6 scipy==1.17.1 \
    torchmetrics==1.9.0 lightning==2.6.6 torch-uncertainty==0.13.0 timm==1.0.31 rich==15.0.0
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - <<'PY'
from importlib.metadata import version

import torch
import torchvision
from torch_uncertainty.methods import deep_ensembles

print(*[f"{name} {version(name)}" for name in ("torch", "torchvision", "torch-uncertainty")])
first = {"resnet18": "conv1.weight", "convnext_tiny": "features.0.0.weight",
         "swin_t": "features.0.0.weight", "vit_b_32": "conv_proj.weight"}
shared, shares, widths = {}, {}, {}
for name, first_weight in first.items():
    torch.manual_seed(0)
    net = torchvision.models.get_model(name)
    ensemble = deep_ensembles(net, num_estimators=2)
    members = [dict(m.named_parameters()) for m in ensemble.core_models]
    # Tensors of one constant (biases, norms) are alike in any two networks.
    random = {key: p for key, p in net.named_parameters() if p.max() > p.min()}
    shared[name] = [key for key, p in random.items()
                    if all(torch.equal(m[key], p) for m in members)]
    count = sum(random[key].numel() for key in shared[name])
    shares[name] = count / sum(p.numel() for p in net.parameters())
    widths[name] = [weights[first_weight].std().item() for weights in (members[0], random)]
    print(f"{name}: {len(shared[name])} tensors ({shares[name]:.1%} of the weights) equal, such as "
          f"{shared[name][:2]}; standard deviation of {first_weight}: "
          f"member {widths[name][0]:.3f}, net {widths[name][1]:.3f}")
assert 0.2 < shares["vit_b_32"] < 0.3
assert sum(key.endswith("in_proj_weight") for key in shared["vit_b_32"]) == 12
assert "encoder.pos_embedding" in shared["vit_b_32"]
assert len(shared["swin_t"]) == 12 and shared["resnet18"] == []
for name in ("resnet18", "convnext_tiny"):
    member, single = widths[name]
    assert member > 1.5 * single
PY
