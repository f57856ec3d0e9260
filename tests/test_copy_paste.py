"""The Method section of each script, cut out and run alone under the imports that its comment
names: no common, no data, no process group. The recipes of the README run as printed, and what the
tests of a script leave out is checked against brute force in float64."""

import ast
import builtins
import dis
import json
import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from conftest import REPO, SCRIPTS
from scipy.linalg import sqrtm
from scipy.stats import multivariate_normal
from torch.distributions import Categorical

OURS = ("common", "data", *SCRIPTS)


def method_section(script):
    """(the Method section, the imports that its first comment names)."""
    text = (REPO / f"{script}.py").read_text()
    section = re.search(r"^# ---- Method -+\n(.*?)^# ---- ", text, re.M | re.S)[1]
    named = re.search(r"it needs (.*?)\.\n", section.replace("\n# ", " "), re.S)[1]
    imports = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            package = getattr(node, "module", None) or node.names[0].name
            if package.split(".")[0] in re.findall(r"\w+", named):
                imports.append(node)
    assert imports and not {name.name for node in imports for name in node.names} & {*OURS}
    return section, imports


def paste(*scripts):
    """(namespace with the Method sections of scripts under their imports, code of the last)."""
    module = types.ModuleType("pasted")
    for script in scripts:
        section, imports = method_section(script)
        exec(compile(ast.Module(imports, []), "imports", "exec"), vars(module))
        code = compile(section, script, "exec")
        exec(code, vars(module))
    return module, code


@pytest.fixture
def method(request, monkeypatch):
    """The pasted section of the script that the test's name, or its parameter, says."""
    for name in OURS:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    torch.manual_seed(0)
    return paste(next(s for s in SCRIPTS if s in request.node.name))[0]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(ours, wanted, rtol=1e-9, atol=1e-11):
    ours, wanted = (x.detach() if torch.is_tensor(x) else x for x in (ours, wanted))
    np.testing.assert_allclose(ours, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_section_knows_no_name_from_elsewhere(script):
    module, code = paste(script)
    codes = [code]
    for inner in codes:  # grows: functions, and functions in them
        codes += [const for const in inner.co_consts if isinstance(const, types.CodeType)]
    loads = {i.argval for inner in codes for i in dis.get_instructions(inner)
             if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    unknown = loads - {*vars(module), *dir(builtins), "__name__", "__qualname__", "__annotations__"}
    assert "torch" in loads and len(codes) > 10 and not unknown
    assert not [inner.co_name for inner in codes if "args" in inner.co_varnames]


def test_no_name_of_a_method_has_two_meanings():
    """All five sections can be pasted into one file."""
    meanings = {}
    for script in SCRIPTS:
        section, imports = method_section(script)
        for node in [*imports, *ast.parse(section).body]:
            names = [getattr(node, "name", None)]  # of a function or a class
            for part in [*getattr(node, "names", []), *getattr(node, "targets", [])]:
                names.append(getattr(part, "asname", None) or getattr(part, "name", None)
                             or getattr(part, "id", None))
            for name in filter(None, names):
                meaning = ast.dump(node)
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    meaning = getattr(node, "module", None)
                first, expected = meanings.setdefault(name, (script, meaning))
                assert meaning == expected, f"{name} of {script} and {first}"


# What the recipes of the README leave behind, by script: the name and shape of a result.
RECIPES = {"ddu": ("is_unknown", (8,)), "forde": ("logits", (4, 32, 10)),
           "gbnn2d": ("logits", (50, 10)), "proxy_distill": ("uncertainty", (32,)),
           "swag_laplace_ensembles": ("probs", (90, 10))}


def readme_block():
    """The README's block of recipes."""
    section = (REPO / "README.md").read_text().split("## Copying a method")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.S)[1]


def test_the_readmes_block_runs_as_printed_under_all_five_sections(monkeypatch):
    for name in OURS:
        monkeypatch.setitem(sys.modules, name, None)
    exec(readme_block(), vars(paste(*SCRIPTS)[0]))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readmes_recipe_needs_its_own_section_alone(script, method):
    """On its own inputs in float32, each statement once, and with gradients where it has some."""
    recipe = re.search(rf"^# {script}\.py: .*?(?=^# \w+\.py: |\Z)", readme_block(),
                       re.M | re.S)[0]
    names = vars(method)
    torch.manual_seed(0)
    exec(recipe, names)
    name, shape = RECIPES[script]
    results = names[name]
    if script == "proxy_distill":
        assert {"total", "aleatoric", "epistemic"} <= results.keys()
        results = torch.stack([*results.values()])
        shape = (len(results), *shape)
        assert names["z"].grad.abs().max() > 0
    assert results.shape == shape and results.double().isfinite().all()
    if script == "ddu":
        assert results.sum() > 4  # three times as far away
    elif script == "forde":
        assert all(net[0].weight.grad.abs().max() > 0 for net in names["nets"])
    elif script == "gbnn2d":
        assert names["weights"].centre.isfinite().all() and names["gradient"].max() > 0
    elif script == "swag_laplace_ensembles":
        assert torch.allclose(results.sum(1), torch.ones(90), atol=1e-4)


def test_gbnn2d_mixture_is_that_of_plain_em(method):
    x = torch.cat([double(150, 2) * t + u for t, u in ((.3, 0), (1., 2), (.1, -2))])
    x *= torch.tensor([1.0, 0.01])
    start, _ = method.fit_mixture(x, 4, torch.Generator().manual_seed(0), iterations=0)
    method.BLOCK = 170  # several blocks, the last one smaller
    ours, history = method.fit_mixture(x, 4, torch.Generator().manual_seed(0), iterations=8)
    weight, centre, covariance = start
    ridge = 1e-6 * x.var(0).diag()
    joint = double(450, 4)
    for step in range(9):
        for k in range(4):
            gaussian = multivariate_normal(centre[k], covariance[k])
            joint[:, k] = weight[k].log() + torch.tensor(gaussian.logpdf(x))
        if step == 8:
            break
        close(history[step], joint.logsumexp(1).mean())
        r = joint.softmax(1)
        mass = r.sum(0)
        weight = mass / len(x)
        centre = r.T @ x / mass[:, None]
        covariance = torch.zeros(4, 2, 2).double()
        for k in range(4):
            offset = x - centre[k]
            covariance[k] = (offset * r[:, k:k + 1]).T @ offset / mass[k] + ridge
    for own, wanted in zip(ours, (weight, centre, covariance)):
        close(own, wanted, rtol=1e-7, atol=1e-9)
    label = method.assign(x, ours)
    top, best = joint.topk(2)
    assert torch.equal(label, best[:, 0])
    weights = method.encode(x, label, ours)
    assert torch.equal(weights.second, best[weights.ellipse_point, 1])
    close(weights.alpha, top[weights.ellipse_point].softmax(1)[:, 0], rtol=1e-5)
    offset = x - centre[label]
    precision = torch.linalg.inv(covariance)[label]
    outside = torch.einsum("ni,nij,nj->n", offset, precision, offset) > 5.991464547  # 95 %
    assert torch.equal(weights.ellipse_point, outside.nonzero()[:, 0]) and 5 < outside.sum() < 100


def naive_w2(c, s, d, t):
    root = sqrtm(s)
    return math.sqrt(((c - d) ** 2).sum() + np.trace(s + t - 2 * sqrtm(root @ t @ root)).real)


@pytest.mark.parametrize("tau, tau_g, tau_v, left", [
    (0.9, math.inf, math.inf, None), (1.2, 0.3, math.inf, None), (1.2, math.inf, 0.05, None),
    (0.0, math.inf, math.inf, 12), (math.inf, math.inf, math.inf, 1)])
def test_gbnn2d_merges_the_closest_pair_until_none_is_close(method, tau, tau_g, tau_v, left):
    """Of those whose gradients and variances differ by less than tau_g and tau_v."""
    k = 12
    root = 0.3 * double(k, 2, 2)
    mixture = method.GaussianMixture(double(k).softmax(0), double(k, 2), root @ root.mT)
    gradient = torch.rand(k).double()
    before = [tensor.clone() for tensor in (*mixture, gradient)]
    parts = [list(part) for part in zip(*(t.clone().numpy() for t in before))]
    _, c, s = mixture
    close(method.wasserstein(c[0], s[0], c[1:], s[1:]),
          [naive_w2(*parts[0][1:3], *p[1:3]) for p in parts[1:]])
    merged = method.merge_mixture(mixture, gradient, tau, tau_g, tau_v)
    while True:
        pairs = [(naive_w2(*parts[i][1:3], *parts[j][1:3]), i, j)
                 for j in range(len(parts)) for i in range(j)
                 if abs(parts[i][3] - parts[j][3]) < tau_g
                 and abs(np.trace(parts[i][2] - parts[j][2])) / 2 < tau_v]
        w2, i, j = min(pairs, default=(math.inf, 0, 0))
        if w2 >= tau:
            break
        (w, c, s, g), (v, d, t, h) = parts[i], parts.pop(j)
        p, q = w / (w + v), v / (w + v)
        covariance = p * s + q * t + p * q * np.outer(c - d, c - d)
        parts[i] = [w + v, p * c + q * d, covariance, p * g + q * h]
    assert len(parts) == left if left else 1 < len(parts) < k - 1
    parts.sort(key=lambda part: part[1][0])
    order = merged.centre[:, 0].argsort()
    for own, wanted in zip(merged, zip(*parts)):
        close(own[order], np.stack(wanted))
    for tensor, old in zip((*mixture, gradient), before):
        assert torch.equal(tensor, old)  # the arguments stay


def test_proxy_distill_mimo(method):
    """Each subnetwork sees its own images, and gives its own logits."""
    mimo = method.MIMO(torch.nn.Flatten(), 2)
    images = double(7, 3, 4, 4)
    rows = method.mimo_rows(7, 2, torch.Generator().manual_seed(0))
    close(mimo(images[rows]), images[rows].flatten(2))
    close(mimo(images), torch.stack([images.flatten(1)] * 2, 1))


def test_swag_laplace_ensembles_swag(method):
    iterates = double(4, 6)
    mean, variance, deviations = method.swag_moments(iterates.clone())
    close(variance, iterates.var(0, correction=0))
    basis = torch.eye(10).double()  # samples are linear in the noise: their covariance, exactly
    samples = method.swag_samples(mean, variance, deviations, basis[:, :6], basis[:, 6:])
    root = samples - mean
    close(root.T @ root, (iterates.var(0, correction=0).diag() + iterates.T.cov()) / 2)


def test_swag_laplace_ensembles_mixture(method):
    samples = double(5, 7, 3).log_softmax(-1)
    running = method.RunningMixture()
    for sample in samples:
        running.add(sample)
    close(running.log_probs(), samples.exp().mean(0).log())
    close(running.entropy(), Categorical(logits=samples).entropy().mean(0))


def test_the_gpu_script_runs_on_the_cpu(tmp_path):
    import gpu
    gpu.main(["--tiny", "--out", str(tmp_path / "gpu.json")])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["name"] for row in rows} == {*gpu.ROWS} and len(rows) > 12
    assert all(row.get("value", 0) > 0 for row in rows), rows
