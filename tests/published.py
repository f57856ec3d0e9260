"""Files that the authors of three papers published become files that the scripts here evaluate.

  python tests/published.py FILE ... [--out-dir runs] [options of the script]

A FILE itself says what it is: for proxy_distill.py a member or student (Lightning's .ckpt; unpack
ensemble.tar.gz), for gbnn2d.py 2DGBNNs.pth or a network of stage 0 or 1, for
swag_laplace_ensembles.py MAP, SWA, SWAG, LLLA or LA-NF, all files of a study at once. Printed are
the commands that evaluate the results. Options, such as --data-dir, --dataset and --vocab (SST-2:
the word pieces of bert-base-uncased), are those of the script; for 2DGBNNs.pth and studies the data
must be here already. Nothing but tensors and plain values is unpickled.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402  from the folder above
import data  # noqa: E402
import gbnn2d  # noqa: E402
import proxy_distill  # noqa: E402
import swag_laplace_ensembles as swag  # noqa: E402


class ConfigNode:
    """Stands for classes of OmegaConf: keeps the state of an object, and runs none of its code."""

    def __setstate__(self, state):
        self.state = state

    def get(self, *names):
        """The value to which the names lead; None if there is none."""
        if not names:
            return self.state["_val"]
        content = self.state["_content"]
        return content[names[0]].get(*names[1:]) if names[0] in content else None


OMEGACONF = ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode", "base.Metadata",
             "base.ContainerMetadata")
ALLOWED = [(ConfigNode, f"omegaconf.{name}") for name in OMEGACONF]
# An ordinary dictionary, because torch.load does not fill a defaultdict.
ALLOWED += [(lambda *_: {}, "collections.defaultdict"), dict, list, int, Any]


def save(content, path, out_dir):
    """Write what a published file became; returns the new path, named after the folders, too."""
    names = path.resolve().with_suffix(".pt").parts[1:][-4:]
    target = out_dir / "published" / "-".join(names)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, target)
    return str(target)


def in_order(state, expected):
    """The tensors of a state dict by the names `expected`, of layers that have the same order."""
    if [name.split(".")[-1] for name in state] != [name.split(".")[-1] for name in expected]:
        raise ValueError(f"other layers than {list(expected)[:3]}, ...")
    return dict(zip(expected, state.values()))


def convert_proxy(path, file, out_dir, options):
    """A member or student; returns the command, in which other members may follow a member."""
    state = file["state_dict"]
    model = "resnet50" if "model.layer1.0.conv3.weight" in state else "resnet18"
    argv = ["--dataset", "imagenet", "--model", model, "--width", "1"] + options
    args = proxy_distill.parse_args(argv + ["--losses"])
    net = proxy_distill.make_network(args, len(state["model.fc.bias"]), (3, 224, 224))
    target = save(in_order(state, net.state_dict()), path, out_dir)
    # Of the published networks, students alone have a loss among their options.
    if {"loss", "loss_type"} & set(file.get("hyper_parameters", {})):
        return ["proxy_distill.py", "--student-path", target] + argv
    return ["proxy_distill.py"] + argv + ["--losses", "--ensemble-paths", target]


# ---- gbnn2d.py ----------------------------------------------------------------------------------

CIFAR100 = ((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047))
CIFAR = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
# A batch norm that tells a network from the others: its length at --width 1, --model, --dataset,
# the shape of images, their mean and std in stages 0 and 1, and in the scripts that predict.
LAYOUTS = {
    "conv1.1.weight": (64, "resnet18", "cifar100", (3, 32, 32), CIFAR100, CIFAR100),
    "layer1.0.bn1.weight": (64, "resnet18", "imagenet", (3, 224, 224), *[data.IMAGENET] * 2),
    "block1.layer.0.bn2.weight": (160, "wide_resnet", "cifar100", (3, 32, 32), CIFAR, CIFAR100)}


def prepare(path, state, options):
    """(network of random weights, both statistics, args, argv) for a state dict."""
    [norm] = [name for name in LAYOUTS if name in state]
    length, model, dataset, shape, *statistics = LAYOUTS[norm]
    outputs = len(state["fc.bias"])
    if outputs == 10 or "cifar10" in path.resolve().parts:  # which may have 100 outputs
        dataset = "cifar10"
    argv = ["--dataset", dataset, "--model", model, "--width"]
    argv += [f"{len(state[norm]) / length:g}"] + options
    args = gbnn2d.parse_args(argv)
    return gbnn2d.make_network(args, outputs, shape), statistics, args, argv


def without_biases(state):
    """A state dict without biases of convolutions, which the running means behind them absorb."""
    norms = [name.removesuffix(".running_mean") for name in state if name.endswith("running_mean")]
    before = {norm: [f"{norm[:-1]}{int(norm[-1]) - 1}"] for norm in norms}  # in a list of layers
    if "block1.layer.0.bn1.weight" in state:
        # Wide ResNet: norms of the sum over blocks, which begins anew where there is a projection.
        terms = ["conv1"]
        for block in dict.fromkeys(norm[:-3] for norm in norms if norm != "bn1"):
            before |= {f"{block}bn1": terms, f"{block}bn2": [f"{block}conv1"]}
            if len(state[f"{block}bn1.weight"]) != len(state[f"{block}bn2.weight"]):
                terms = [f"{block}convShortcut"]
            terms = terms + [f"{block}conv2"]
        before["bn1"] = terms
    result = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        if kind == "running_mean":
            convs = [conv for conv in before[layer] if conv not in norms]
            tensor = tensor - sum(state.get(f"{conv}.bias", 0) for conv in convs)
        if kind != "bias" or layer in norms or layer == "fc":
            result[name] = tensor
    return result


def shared_weights(parts, model):
    """The SharedWeights of 2DGBNNs.pth."""
    # Weights outside of ellipses are constants in the script for WRN: outliers with sigma 0. Those
    # for ResNet-18 overwrite these constants: here they are the component of the label alone.
    points = torch.tensor(parts["ellipse_outdices"], dtype=torch.long)
    outlier = parts["outliers_indices"]
    mu = parts["outliers_posterior_loc"]
    sigma = parts["outliers_posterior_sigma"]
    if model == "wide_resnet":
        # a_1 c_1 + a_2 c_2, where a is the softmax of the two values of a weight; but a_1 c_1, not
        # renormalised, unless both values are above e^12 (in float32).
        pairs = [parts["ellipse_outdices_dict"][point] for point in points.tolist()]
        values = [parts["ellipse_outdices_value_dict"][point] for point in points.tolist()]
        value = torch.tensor(values, dtype=torch.float64).view(-1, 2)
        component = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        terms = value.softmax(1) * parts["centers_guide"][component, 0]        # [E, 2]
        terms[:, 1] *= (value > torch.tensor(12.0).exp()).all(1)
        kept = ~torch.isin(outlier, points)
        outlier = torch.cat([outlier[kept], points])
        mu = torch.cat([mu[kept], terms.sum(1).float()])
        sigma = torch.cat([sigma[kept], torch.zeros(len(points))])
    points = points[~torch.isin(points, outlier)]
    label = parts["filtered_labels"].short().index_fill(0, outlier, -1)
    return gbnn2d.SharedWeights(label, outlier.int(), mu, sigma, points.int(),
                                torch.zeros_like(points).short(), torch.ones(len(points)),
                                parts["centers_guide"], parts["scale_tril_posterior"])


def convert_shared(path, file, out_dir, options):
    """2DGBNNs.pth, for --load; returns the command."""
    rest = file["state_dict_no_weight"]
    net, (_, (mean, std)), args, argv = prepare(path, rest, options)
    guide = file["params_guide"]
    # Files of another published script have other names for these two.
    parts = {"centers_guide": guide.get("centers"),
             "outliers_posterior_sigma": guide.get("outliers_posterior_simga")}
    parts = parts | guide | file["params_dict_indices"]
    names = ("model", "width", "image_size")
    content = {"options": {name: getattr(args, name) for name in names} | {"draw": "equal"},
               "weights": shared_weights(parts, args.model)._asdict(),
               "rest": in_order(without_biases(rest), gbnn2d.deterministic_tensors(net)),
               "classes": list(data.load(args.dataset, "test", args.data_dir, 32).classes),
               "mean": mean, "std": std}
    return ["gbnn2d.py", "--load", save(content, path, out_dir)] + argv


def convert_stage(path, file, out_dir, options):
    """The network of stage 0 or 1, for --weights; returns the command."""
    state = {}
    rho = []
    for name, tensor in file.get("net", file.get("state_dict", file)).items():
        name = name.removeprefix("module.")
        if name.endswith("weight_sigma"):
            rho.append(tensor)
        elif not name.endswith(("prior_mu", "prior_bias_mu", "bias_sigma")):
            state[name.removesuffix("_mu")] = tensor
    net, ((mean, std), _), _, argv = prepare(path, state, options)
    content = {"net": in_order(without_biases(state), net.state_dict()), "mean": mean, "std": std}
    argv += ["--epochs", "0"]
    if rho:
        argv += ["--stoch-epochs", "0"]
        # The published sigma may be negative, which is the same Gaussian as that of its magnitude.
        sigma = [(0.0003 + tensor.exp()).log().abs().clamp_min(1e-8) for tensor in rho]
        content["sigma"] = dict(zip(gbnn2d.weight_shapes(net), sigma, strict=True))
    return ["gbnn2d.py", "--weights", save(content, path, out_dir)] + argv


# ---- swag_laplace_ensembles.py ------------------------------------------------------------------

POSTERIORS = {"MAP": "map", "SWA": "swa", "SWAG": "swag", "LastLayerLaplace": "llla",
              "PosteriorRefinedLastLayerLaplace": "la_nf"}
# Parts of the names of BERT and PaiNN, and what replaces them, one after another.
NAMES = {
    "backbone.model.": "backbone.0.", "embeddings.LayerNorm": "norm", "encoder.layer": "layers",
    "embeddings.word_embeddings": "words", "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types", "attention.self.query.": "self_attn.in_proj_",
    "attention.self.key.": "self_attn.in_proj_", "attention.self.value.": "self_attn.in_proj_",
    "attention.output.dense": "self_attn.out_proj", "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1", "output.dense": "linear2", "output.LayerNorm": "norm2",
    "pooler.dense": "pooler.0", "head.fc": "head", "atom_embedding": "embedding",
    "1.partial_readout_network": "0.readout", "message_blocks": "layers", "update_blocks": "layers",
    "scalar_network.0": "message.0", "scalar_network.3": "message.2", "rbf_network.0": "filter",
    "U.0": "u", "V.0": "v", "scalar_vector_network.0": "update.0",
    "scalar_vector_network.3": "update.2", "head.head.readout_network": "head", "head.head.": ""}


def collect(path, file, studies):
    """Add a file to {(data set, model): {seed: {posterior: (path, learning rate, state)}}}."""
    cfg = file["cfg"]
    kind = POSTERIORS[cfg.get("inference", "init", "_target_").split(".")[-1]]
    depth, widening, norm, dim, layers = [
        cfg.get("model", "backbone", name)
        for name in ("depth", "widen_factor", "norm_type", "hidden_size", "n_layers")]
    model = f"bert_{dim}_{layers}" if dim else "painn"
    if depth:
        model = f"wrn_{depth}_{widening}" + ("_bn" if norm == "bn" else "")
    study = studies.setdefault((cfg.get("data", "name").lower(), model), {})
    rate = cfg.get("inference", "fit", "optimizer", "lr") or 0.0
    found = (path, rate, file["state_dict"])
    posteriors = study.setdefault(cfg.get("seed"), {})
    if posteriors.setdefault(kind, found) is not found:
        raise common.UserError(f"{path} is the second {kind} of one seed; give the selected one")


def network_of(posteriors):
    """The published state dict of theta_m, which SWA's and SWAG's files do not contain."""
    found = [name for name in ("map", "llla", "la_nf") if name in posteriors]
    if not found:
        path, _, _ = next(iter(posteriors.values()))
        raise common.UserError(f"{path}: give the MAP file of the same seed, too")
    _, _, state = posteriors[found[0]]
    state = state.get("llla_inference", state)
    return state.get("model", state)


def convert_network(state, net):
    """The state dict of `net`, a WRN, BERT or PaiNN, from a published one."""
    renamed = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.")
        # FRN's constant epsilon; what PaiNN computes from the rest.
        if re.search(r"\.eps$|radial_basis|prediction_finalizer|^iterates$", name):
            continue
        for part, ours in NAMES.items():
            name = name.replace(part, ours)
        if name.endswith((".gamma", ".beta", ".tau")):
            tensor = tensor.squeeze(0)                                 # [1, C, 1, 1]
        if name in renamed:  # query, key and value are one matrix
            tensor = torch.cat([renamed[name], tensor])
        renamed[name] = tensor
    if "atom_refs" in renamed:
        references = renamed.pop("atom_refs").squeeze(1)               # [100]
        renamed["references"] = torch.cat([references, references.new_zeros(1)])
    is_wrn = "backbone.conv_1.weight" in renamed
    return in_order(renamed, net.state_dict()) if is_wrn else renamed


def convert_iterates(state, net):
    """SWAG's iterates [R, P] in the order of the parameters of `net`, without FRN's epsilons."""
    tensors = dict(state)
    iterates = tensors.pop("iterates")                                 # [P', R]
    # In a published iterate, all parameters follow each other as in the file.
    buffers = r"\.running_|\.num_batches|radial_basis|head\.head\.[^r]"
    names = [name for name in tensors if not re.search(buffers, name)]
    sizes = [tensors[name].numel() for name in names]
    vectors = []
    for column in iterates.T:
        for name, values in zip(names, column.split(sizes)):
            tensors[name] = values.view(tensors[name].shape)
        ours = convert_network(tensors, net)
        vectors.append(torch.cat([ours[name].flatten() for name, _ in net.named_parameters()]))
    return torch.stack(vectors)


def convert_heads(method, path, state, member, args):
    """S last layers [S, P] of LLLA or LA-NF, from the noise that the script would use."""
    theta = swag.flat_head(member.net.head).detach()
    llla = state.get("llla_inference", state)
    if not torch.allclose(llla["mean"].to(theta), theta, rtol=1e-4, atol=1e-6):
        raise common.UserError(f"{path}: its network is not that of the same seed")
    covariance = llla["covariance"].to(theta.device).double()          # [P, P], or its diagonal
    noise = swag.draw_noise((args.samples, len(theta)), "llla", member, args).double()
    if covariance.ndim == 2:
        offset = noise @ torch.linalg.cholesky(covariance).T
    else:
        offset = noise * covariance.sqrt()
    heads = theta + offset.float()
    if method == "la_nf":
        flow = []
        for kind in ("x0", "alpha_prime", "beta_prime"):
            names = [f"transform.{layer}.{kind}" for layer in range(state["num_transforms"])]
            layers = [state["guide_state_dict"][name].to(heads) for name in names]
            flow.append(torch.stack(layers).squeeze(-1))
        heads, _ = swag.apply_flow(swag.Flow(*flow), heads)
    return heads.cpu()


def convert_study(dataset, model, study, out_dir, options):
    """The run directory of a study; returns the command."""
    seeds = sorted(study)
    methods = [method for method in ("swa", "swag", "llla", "la_nf") if method in study[seeds[0]]]
    if len({frozenset(posteriors) - {"map"} for posteriors in study.values()}) > 1:
        raise common.UserError(f"{dataset}, {model}: not all seeds have the same posteriors")
    name = f"published-{dataset}-{model}"
    targets = [out_dir / "swag_laplace_ensembles" / name / f"map-seed{seed}.pt" for seed in seeds]
    argv = ["--dataset", dataset, "--model", model, "--width", "1", "--seed", str(seeds[0])]
    argv += ["--name", name, "--out-dir", str(out_dir), "--methods"]
    argv += methods + ["--map-paths"] + [str(target) for target in targets]
    args = swag.parse_args(argv + options)
    splits = swag.load_splits(args)
    targets[0].parent.mkdir(parents=True, exist_ok=True)
    members = []
    for number, (seed, target) in enumerate(zip(seeds, targets), args.seed):
        net = swag.make_member(args, splits.train).eval()
        net.load_state_dict(convert_network(network_of(study[seed]), net))
        torch.save(net.state_dict(), target)
        members.append(swag.Member(net, number, swag.name_member(net, number)))
    run = common.Run(args, data.fingerprint(splits.train, splits.val),
                     data.fingerprint(splits.test), args.map_paths)
    for member, seed in zip(members, seeds):
        rates = {}
        heads = {}
        for method in methods:
            path, rate, state = study[seed][method]
            if method in ("swa", "swag"):
                rates[method] = rate
                iterates = convert_iterates(state, member.net)
                run.write_tensors(f"{member.name}-sgd-lr{rate:g}", {"iterates": iterates})
            else:
                heads[method] = convert_heads(method, path, state, member, args)
        if rates:
            run.write_tensors(f"{member.name}-sgd", rates)
        if heads:
            run.write_tensors(f"{member.name}-heads-{args.samples}", heads)
    return ["swag_laplace_ensembles.py", "--eval", "--name", name, "--out-dir", str(out_dir)]


def main(argv=None):
    """Convert the files; returns the commands that evaluate them, as lists of words."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out-dir", type=Path, default=Path("runs"))
    args, options = parser.parse_known_args(argv)
    studies = {}
    commands = {}  # {all words but the last: the last ones}
    for path in args.files:
        # Files are mapped into memory, as they may have 5 GB.
        with torch.serialization.safe_globals(ALLOWED), config.patch("load.mmap", True):
            file = common.load(path)
        try:
            if "cfg" in file:
                collect(path, file, studies)
                continue
            convert = convert_shared if "params_guide" in file else convert_stage
            if "pytorch-lightning_version" in file:
                convert = convert_proxy
            *words, last = convert(path, file, args.out_dir, options)
        except (LookupError, ValueError) as error:
            raise common.UserError(f"{path} is damaged or of another kind: {error!r}") from None
        commands.setdefault(tuple(words), []).append(last)
    commands = [list(words) + last for words, last in commands.items()]
    commands += [convert_study(*key, study, args.out_dir, options)
                 for key, study in studies.items()]
    for command in commands:
        print(shlex.join(["python"] + command))
    return commands


if __name__ == "__main__":
    common.launch(main)
