"""data.py: texts and molecules: word pieces, published layouts, embedded sets, the loaders."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import data
from data import (Loader, MoleculeSet, SequenceLoader, TextSet, load_molecules, load_text, tokenise,
                  vocabulary)
from test_data import as_rank, check_ranks, digest, joined, refuses, toy  # noqa: F401  a fixture


def rows_of(values, sizes):
    return [row.tolist() for row in values.split(sizes.tolist())]


def toy_texts(n=53):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (n,), generator=generator)
    tokens = torch.randint(1, 40, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    return TextSet("toy", tokens, lengths, torch.arange(n) % 2, 2, ("[PAD]",) * 40)


def toy_molecules(n=23):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 7, (n,), generator=generator)
    numbers = torch.randint(1, 9, (int(sizes.sum()),), generator=generator)
    positions = 2.5 * torch.randn(len(numbers), 3, generator=generator, dtype=torch.float64)
    return MoleculeSet("toy", numbers, positions, sizes, torch.arange(n).double(),
                       data.atom_references())


@pytest.mark.parametrize("index, rows", [
    ([4, 1, 4], [4, 1, 4]), (slice(2, 5), [2, 3, 4]), ([], []),
    (torch.arange(23) % 11 == 5, [5, 16])])
def test_sets_select_all_their_fields(index, rows):
    texts = toy_texts(23)
    sentences = rows_of(texts.tokens, texts.lengths)
    part = texts.select(index)
    assert rows_of(part.tokens, part.lengths) == [sentences[row] for row in rows]
    assert part.labels.tolist() == [row % 2 for row in rows]
    molecules = toy_molecules()
    part = molecules.select(index)
    for field in ("numbers", "positions"):
        atoms = rows_of(getattr(molecules, field), molecules.sizes)
        assert rows_of(getattr(part, field), part.sizes) == [atoms[row] for row in rows]
    assert part.labels.tolist() == rows


# ---- OOD sets and sets to predict ----------------------------------------------------------


def test_ood_and_predicted_texts(tmp_path):
    write_sst2(tmp_path)
    train = load_text("reviews", "train")
    assert train.classes == ("negative", "positive")
    more = replace(train, vocab=(*train.vocab, "more"))
    sets = data.ood_sets(["reviews_finance", "sst2"], more)
    assert list(sets) == ["reviews_finance"]
    assert sets["reviews_finance"].vocab == more.vocab
    refuses("dataset 'x.npz' is unknown", data.ood_sets, ["x.npz"], train)
    # Labels go by the names of classes: no report on a company is positive or negative.
    assert data.predict_set("reviews_finance", train).labels.unique().tolist() == [-1]
    assert data.predict_set("sst2", train, tmp_path).labels.tolist() == [1, 0]  # dev.tsv
    swapped = replace(train, classes=("positive", "negative"))
    assert data.predict_set("sst2", swapped, tmp_path).labels.tolist() == [0, 1]


def test_labels_of_another_quantity_are_unknown(tmp_path):
    write_sdf(tmp_path, range(1, 31))
    train = load_molecules("qm9", "train", tmp_path)
    own = data.predict_set("qm9", train, tmp_path)
    assert own.labels.tolist() == load_molecules("qm9", "test", tmp_path).labels.tolist()
    assert data.ood_sets(["clusters_large"], train, tmp_path)
    # The energy of a cluster is no quantity of QM9.
    predicted = data.predict_set("clusters_large", train, tmp_path)
    assert len(predicted) == 1000
    assert predicted.labels.isnan().all()
    clusters = load_molecules("clusters", "train")
    assert data.predict_set("qm9", clusters, tmp_path).labels.isnan().all()


# ---- Word pieces ---------------------------------------------------------------------------

VOCAB = (*data.SPECIAL, *"abcdeinou", *("##" + c for c in "abcdenosu"), "un", "##able", "want",
         "##want", "##ed", "runn", "##ing", "cafe", "!", ",", "'", "$")


def pieces(text, vocab=VOCAB):
    tokens, lengths = tokenise([text], vocab)
    assert lengths.tolist() == [len(tokens)]
    assert tokens.dtype == torch.int32
    words = [vocab[i] for i in tokens]
    assert (words[0], words[-1]) == ("[CLS]", "[SEP]")
    return words[1:-1]


@pytest.mark.parametrize("text, want", [
    ("UNwanted running", "un ##want ##ed runn ##ing"),  # the example of BERT's own tests
    ("unwantedX running", "[UNK] runn ##ing"),  # one unknown character loses the whole word
    ("un!able", "un ! [UNK]"),  # able is there as ##able alone
    ("unable,unable", "un ##able , un ##able"),
    ("a\u0000b\ufffdc\u200dd", "a ##b ##c ##d"),  # control characters vanish within a word
    ("a\u2028b\x85e", "a b ##e"),  # a line separator parts words; a control character does not
    ("can't $b", "c ##a ##n ' [UNK] $ b"), (" \u0301 ", ""),
    ("a" * 100, " ".join(["a"] + ["##a"] * 99)), ("a" * 101, "[UNK]"),
    ("a " * 300, "a " * 266),  # the first 268 pieces, with [CLS] and [SEP]
])
def test_word_pieces_by_hand(text, want):
    assert pieces(text) == want.split()


@pytest.mark.parametrize("text, want", [
    ("Hello,\tWorld!\u00a0it's 5$\u3000^_^ ~a`b", "hello , world ! it ' s 5 $ ^ _ ^ ~ a ` b"),
    ("naïve Ångström ÀÉÎ İstanbul ﬁne ½ ２", "naive angstrom aei istanbul ﬁne ½ ２"),
    ("日本語 is 漢字b 😀👍🏽 ok", "日 本 語 is 漢 字 b 😀👍🏽 ok"),
    ("¿qué? «no» — … “q”", "¿ que ? « no » — … “ q ”"),
    ("\ufeffbom \u2029para x²+y³=π ｆｕｌｌ Ωmega ς", "bom para x² + y³ = π ｆｕｌｌ ωmega ς"),
])
def test_words_are_those_of_google_s_basic_tokenizer(text, want):
    assert data._words(text) == want.split()


def test_vocabulary_rule():
    sentences = ["The cat , the dog", "a dog naïve the", "zebra cat yak", "yak"]
    vocab = vocabulary(sentences)
    letters = sorted(set(",thecadognivzbryk"))
    continued = ["##" + c for c in letters]
    words = ["the", "cat", "dog", "yak"]  # not zebra, not naive
    assert list(vocab) == [*data.SPECIAL, *letters, *continued, *words]
    assert vocabulary(sentences, 40) == vocab[:40]
    assert "[UNK]" not in pieces("zebra naive", vocab)


# ---- SST-2 ---------------------------------------------------------------------------------

SENTENCES = [f"sentence {'abcdefghij'[k % 10]} {k}" for k in range(40)]


def write_sst2(folder, test="index\tsentence\n0\tfine\n"):
    train = "".join(f"{sentence}\t{k % 2}\n" for k, sentence in enumerate(SENTENCES))
    (folder / "SST-2").mkdir(exist_ok=True)
    for file, text in (("train", "sentence\tlabel\n" + train), ("test", test),
                       ("dev", "sentence\tlabel\ngood film\t1\nbad film\t0\n")):
        (folder / "SST-2" / f"{file}.tsv").write_text(text, newline="")


LABELLED = 'sentence\tlabel\nit \'s "fine\t1\nawful\t0\ngood\t1'


def words_of(dataset):
    return [" ".join(dataset.vocab[i] for i in row)
            for row in rows_of(dataset.tokens, dataset.lengths)]


def test_published_splits_where_test_is_labelled(tmp_path):
    write_sst2(tmp_path, test=LABELLED)
    train = load_text("sst2", "train", tmp_path)
    val = load_text("sst2", "val", tmp_path)
    test = load_text("sst2", "test", tmp_path)
    assert train.labels.tolist() == [0, 1] * 20
    assert val.labels.tolist() == [1, 0]
    assert test.labels.tolist() == [1, 0, 1]
    assert train.vocab == val.vocab == test.vocab == vocabulary(SENTENCES)
    assert words_of(train)[3] == "[CLS] sentence d 3 [SEP]"
    few = data.stratified_subset(train, 4)
    assert few.labels.bincount().tolist() == [2, 2]
    assert set(words_of(few)) < set(words_of(train))
    want = data.fingerprint(train)
    assert data.fingerprint(train.select(range(40))) == want != data.fingerprint(few)
    assert data.fingerprint(replace(train, vocab=("x", *train.vocab[1:]))) != want


def test_splits_where_glue_withholds_the_labels(tmp_path):
    write_sst2(tmp_path)
    assert not data.sst2_has_test_labels(tmp_path)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    whole = load_text("sst2", "train", tmp_path)
    for split, rows in (("train", sorted(order[4:])), ("val", order[:4])):
        part = load_text("sst2", split, tmp_path, reference=whole)
        sentences = [pieces(SENTENCES[k], whole.vocab) for k in rows]
        assert words_of(part) == [" ".join(["[CLS]", *words, "[SEP]"]) for words in sentences]
        assert part.labels.tolist() == [k % 2 for k in rows]
    assert load_text("sst2", "test", tmp_path).labels.tolist() == [1, 0]  # dev.tsv


def test_vocabulary_file(tmp_path):
    write_sst2(tmp_path)
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    train = load_text("sst2", "train", tmp_path, vocab_file=file)
    assert train.vocab == VOCAB
    assert train.tokens[:3].tolist() == [2, 1, 5]
    file.write_text("a\n" + "\n".join(VOCAB), encoding="utf-8")
    refuses("vocab.txt: expected BERT's", load_text, "sst2", "train", tmp_path, vocab_file=file)
    file.write_bytes(b"\xff\xfe")
    refuses("vocab.txt: damaged", data.read_vocabulary, file)


@pytest.mark.parametrize("file, content, says", [
    ("train", "sentence\tlabel\nfine\t1\nno label\n", "line 3: 'no label'; expected sentence"),
    ("train", "sentence\tlabel\nfine\t1\nx\t2\n", "line 3"),
    ("train", "sentence\tlabel\na\t1\nb\t0\n \t1\n", "line 4"),
    ("train", "sentence\tlabel\n", "expected a header.*, and rows; get it from https"),
    ("dev", "good\t1\n", "expected a header sentence<TAB>label")])
def test_damaged_tsv(tmp_path, file, content, says):
    write_sst2(tmp_path, test=LABELLED)
    (tmp_path / "SST-2" / f"{file}.tsv").write_text(content)
    split = {"train": "train", "dev": "val"}[file]
    refuses(f"{file}.tsv: damaged: {says}", load_text, "sst2", split, tmp_path)


def test_real_sst2(real_data):
    train = load_text("sst2", "train", real_data)
    val = load_text("sst2", "val", real_data, reference=train)
    test = load_text("sst2", "test", real_data, reference=train)
    assert (len(train), len(val), len(test)) == (65349, 2000, 872)
    assert train.labels.sum() + val.labels.sum() == 37569
    assert test.labels.sum() == 444
    assert words_of(test.select([1])) == ["[CLS] unflinching ##l ##y bleak and desperate [SEP]"]
    assert digest(test.tokens) == "506026e4a0da"  # as a transcription of Google's code has them


# ---- QM9 -----------------------------------------------------------------------------------

# The first two published molecules: U0 in hartree, and atoms
U0 = {1: "-40.47893", 2: "-56.525887"}
ATOMS = {
    1: [("C", "-0.0127", "1.0858", "0.008"), ("H", "0.0022", "-0.006", "0.002"),
        ("H", "1.0117", "1.4638", "0.0003"), ("H", "-0.5408", "1.4475", "-0.8766"),
        ("H", "-0.5238", "1.4379", "0.9064")],
    2: [("N", "-0.0404", "1.0241", "0.0626"), ("H", "0.0173", "0.0125", "-0.0274"),
        ("H", "0.9158", "1.3587", "-0.0288"), ("H", "-0.5203", "1.3435", "-0.7755")]}
HARTREE = 27.211386246


def write_sdf(data_dir, numbers=(1, 2), rows=None, omitted="  99 CC\n"):
    """Molecules gdb_N in the published layout: odd N are methane, even ones ammonia.

    `numbers`: N in the order of gdb9.sdf; `rows`: in that of gdb9.sdf.csv.
    """
    folder = data_dir / "QM9"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uncharacterized.txt").write_text("Molecules\n\n  Index SMILES\n" + omitted)
    blocks = []
    for number in numbers:
        molecule = ATOMS[2 - number % 2]
        atoms = "".join(f"{float(x):10.4f}{float(y):10.4f}{float(z):10.4f} {s:3} 0  0  0  0\n"
                        for s, x, y, z in molecule)
        blocks.append(f"gdb_{number}\n  -OEChem-03231823253D\n\n{len(molecule):3d}  0  0     0  0 "
                      f" 0  999 V2000\n{atoms}  1  2  1  0\nM  END\n$$$$\n")
    lines = ["mol_id,homo,u0,cv\n"]
    for number in rows or numbers:
        lines.append(f"gdb_{number},-.3877,{U0[2 - number % 2]},6.469\n")
    (folder / "gdb9.sdf.csv").write_text("".join(lines))
    (folder / "gdb9.sdf").write_text("".join(blocks))
    return data_dir


def load_whole(data_dir):
    """The molecules by their numbers."""
    data._qm9.cache_clear()
    return data._qm9(data_dir / "QM9")


def test_sdf_and_units(tmp_path):
    write_sdf(tmp_path)
    whole = load_whole(tmp_path)
    assert whole.sizes.tolist() == [5, 4]
    assert whole.numbers.tolist() == [6, 1, 1, 1, 1, 7, 1, 1, 1]
    places = [[float(x) for x in atom[1:]] for k in (1, 2) for atom in ATOMS[k]]
    assert whole.positions.tolist() == places
    assert whole.labels.tolist() == [-40.47893 * HARTREE, -56.525887 * HARTREE]
    assert whole.references[[1, 8, 9]].tolist() == pytest.approx(
        [-0.500273 * HARTREE, -75.064579 * HARTREE, -99.718730 * HARTREE])
    # What is left to learn is a few eV per atom.
    free = whole.references[whole.numbers].split([5, 4])
    bound = whole.labels - torch.stack([atoms.sum() for atoms in free])
    assert (bound < 0).all() and (bound > -20).all()
    (tmp_path / "QM9" / "uncharacterized.txt").unlink()
    refuses("uncharacterized.txt: not found", load_whole, tmp_path)


def test_molecules_are_joined_and_omitted_by_their_numbers(tmp_path):
    """Some molecules, whose two files have different orders, and a molecule twice."""
    write_sdf(tmp_path, (7, 2, 5, 4, 7), rows=(4, 5, 7, 2), omitted="     2     C   C   -1.0\n\n")
    whole = load_whole(tmp_path)
    assert whole.sizes.tolist() == [4, 5, 5]  # 4, 5, 7
    assert whole.labels.tolist() == [float(U0[k]) * HARTREE for k in (2, 1, 1)]
    write_sdf(tmp_path, (7, 2), rows=(7, 3))
    refuses(r"its molecules \(2\) are not those of gdb9.sdf.csv \(2\)", load_whole, tmp_path)

def test_published_split_of_the_whole_qm9(monkeypatch, tmp_path):
    n = 130831
    whole = MoleculeSet("qm9", torch.ones(n).long(), torch.zeros(n, 3).double(),
                        torch.ones(n).long(), torch.arange(n).double(), data.atom_references())
    monkeypatch.setattr(data, "_qm9", lambda _: whole)
    parts = [load_molecules("qm9", split, tmp_path).labels.long()
             for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [110000, 10000, 10831]
    assert torch.cat(parts).tolist() == np.random.default_rng(0).permutation(n).tolist()


def test_real_part_of_qm9(real_data):
    parts = [load_molecules("qm9", split, real_data) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [11914, 1083, 1173]
    table = (real_data / "QM9" / "gdb9.sdf.csv").read_text().splitlines()
    column = table[0].split(",").index("u0")
    u0 = {}  # 138 molecules of this part occur twice
    for row in table[1:]:
        u0[int(row.split(",")[0].removeprefix("gdb_"))] = float(row.split(",")[column])
    values = np.array([u0[number] for number in sorted(u0)])
    order = np.random.default_rng(0).permutation(14170)
    assert np.array_equal(torch.cat([part.labels for part in parts]), values[order] * HARTREE)


@pytest.mark.parametrize("file, old, new, says", [
    ("gdb9.sdf", " N   0", " Si  0", "sdf: damaged: 'Si'"),
    ("gdb9.sdf", "  5  0  0", "  0  0  0", "sdf: damaged: gdb_1 has no atoms"),
    ("gdb9.sdf", "  4  0  0", " -1  0  0", "sdf: damaged: gdb_2 has no atoms"),
    ("gdb9.sdf", "    1.0117", "       nan", "sdf: a number is not finite"),
    ("gdb9.sdf", "1.4638", "1,4638", "sdf: damaged: .*1,4638"),
    ("gdb9.sdf", "gdb_2", "ammonia", "sdf: damaged: .*ammonia"),
    ("gdb9.sdf", "gdb_2", "gdb_1", r"its molecules \(1\) are not those of gdb9.sdf.csv \(2\)"),
    ("gdb9.sdf.csv", "u0", "U0", "csv: damaged: 'u0'"),
    ("gdb9.sdf.csv", "gdb_2,", "gdb_2,1,", "csv: damaged: .*argument"),
    ("gdb9.sdf.csv", "-40.47893,", "high,", "csv: damaged: .*high"),
    ("gdb9.sdf.csv", "-56.525887", "inf", "a number is not finite"),
])
def test_damaged_sdf(tmp_path, file, old, new, says):
    path = write_sdf(tmp_path) / "QM9" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refuses(f"{says}.*get it from https", load_molecules, "qm9", "train", tmp_path)


# ---- Loaders -------------------------------------------------------------------------------


@pytest.mark.parametrize("size, shuffle", [(1, True), (7, False), (100, False)])
def test_text_batches(size, shuffle):
    dataset = toy_texts()
    loader = SequenceLoader(dataset, size, shuffle=shuffle, seed=3)
    batches = list(loader.epoch(2))
    sentences = rows_of(dataset.tokens, dataset.lengths)
    assert len(batches) == len(loader) == math.ceil(53 / size)
    for batch in batches:  # each row is padded on its own
        length = int(dataset.lengths[batch.index].max())
        rows = [sentences[i] for i in batch.index]
        assert batch.tokens.tolist() == [row + [0] * (length - len(row)) for row in rows]
        assert batch.tokens.dtype == torch.int64
        assert torch.equal(batch.labels, dataset.labels[batch.index])
        assert batch.global_size == len(batch.index) <= size
    order = joined(batches, "index").tolist()
    assert sorted(order) == list(range(53))
    if not shuffle:
        assert order == sorted(range(53), key=lambda row: dataset.lengths[row])


@pytest.mark.parametrize("size, cutoff, shuffle", [
    (1, 5.0, False), (5, 2.0, True), (50, 0.01, True), (6, 50.0, True)])
def test_molecule_batches(size, cutoff, shuffle):
    dataset = toy_molecules()
    batches = list(SequenceLoader(dataset, size, shuffle=shuffle, cutoff=cutoff).epoch(1))
    numbers = rows_of(dataset.numbers, dataset.sizes)
    positions = rows_of(dataset.positions, dataset.sizes)
    for batch in batches:
        graph = batch.molecules
        rows = batch.index.tolist()
        owner = torch.tensor([k for k, row in enumerate(rows) for _ in numbers[row]])
        place = np.concatenate([positions[row] for row in rows])
        near = torch.tensor(cdist(place, place) < cutoff) & (owner[:, None] == owner)
        targets, sources = near.fill_diagonal_(False).nonzero(as_tuple=True)
        for got, want in ((graph.sources, sources), (graph.targets, targets),
                          (graph.molecule, owner), (graph.positions, torch.tensor(place).float()),
                          (batch.labels, dataset.labels[rows])):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        assert graph.numbers.tolist() == [z for row in rows for z in numbers[row]]
        assert graph.count == batch.global_size == len(rows)


CROPPED = partial(Loader, augment="crop_flip")


@pytest.mark.parametrize("make, dataset, world", [
    (Loader, toy(50), 2), (CROPPED, toy(50), 3), (SequenceLoader, toy_texts(), 8),
    (SequenceLoader, toy_molecules(), 3)], ids=["plain", "cropped", "texts", "molecules"])
def test_ranks_together_are_one_process(make, dataset, world, as_rank):  # noqa: F811
    check_ranks(as_rank, world, partial(make, dataset, 8, seed=5, shuffle=True))
    refuses(f"cannot be distributed over {world} process", make, dataset, world - 1)
    refuses(f"distributed over {world} process", make, dataset.select(slice(world - 1)), 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make, dataset", [
    (Loader, partial(toy, 50000, (3, 32, 32))),
    (CROPPED, partial(toy, 50000, (3, 32, 32))),  # over 2**31 pixels in all crops
    (SequenceLoader, toy_texts), (SequenceLoader, toy_molecules)])
def test_batches_on_a_gpu_are_those_of_the_cpu_without_waiting(make, dataset):
    dataset = dataset()
    size = math.ceil(len(dataset) / 9)
    batches = make(dataset, size, "cuda", shuffle=True).epoch()
    got = [next(batches)]  # the order goes to the device once an epoch
    torch.cuda.set_sync_debug_mode("error")
    try:
        got += list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(got, make(dataset, size, "cpu", shuffle=True).epoch(), strict=True):
        for field in set(a._fields) - {"global_size", "molecules"}:
            assert torch.equal(getattr(a, field).cpu(), getattr(b, field)), field


# ---- Embedded sets -------------------------------------------------------------------------


def brute_energy(numbers, positions):
    """The documented formula, pair by pair."""
    radius = {1: 0.35, 6: 0.76, 7: 0.71, 8: 0.66}
    free = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579}
    energy = sum(free[z] * HARTREE for z in numbers)
    for (i, a), (j, b) in combinations(zip(numbers, positions), 2):
        q = math.exp(-1.7 * (math.dist(a, b) - radius[i] - radius[j]))
        energy += 3.5 * (q * q - 2 * q)
    return energy


@pytest.mark.parametrize("name, low, high, want", [
    ("clusters", 4, 10, "f684d9675a50"), ("clusters_large", 11, 16, "2cddb5832b7d")])
def test_embedded_molecules(name, low, high, want):
    train, val, test = [load_molecules(name, split) for split in ("train", "val", "test")]
    assert (len(train), len(val), len(test)) == (4000, 500, 1000)
    assert len(torch.cat([train.labels, val.labels, test.labels]).unique()) == 5500
    assert train.sizes.unique().tolist() == list(range(low, high + 1))
    assert train.numbers.unique().tolist() == [1, 6, 7, 8]
    assert digest(torch.cat([test.numbers, test.sizes])) == want
    for row in range(0, 1000, 20):
        one = test.select([row])
        energy = brute_energy(one.numbers.tolist(), one.positions.tolist())
        assert one.labels.item() == pytest.approx(energy, abs=1e-8)


@pytest.mark.parametrize("name, want, share", [
    ("reviews", "ce9b19404999", 0.5), ("reviews_finance", "afa710403caa", 0)])
def test_embedded_texts(name, want, share):
    sets = [load_text(name, split) for split in ("train", "val", "test")]
    assert [len(own) for own in sets] == [6000, 500, 1000]
    assert len({text for own in sets for text in words_of(own)}) == 7500
    assert not any((own.tokens == sets[0].vocab.index("[UNK]")).any() for own in sets)
    for own in sets:
        assert own.labels.double().mean() == pytest.approx(share, abs=0.05)
        assert own.vocab == load_text("reviews", "test").vocab
    assert digest(torch.cat([sets[2].tokens.long(), sets[2].lengths])) == want
