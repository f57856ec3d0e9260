"""data.py: texts and molecules: word pieces, published layouts, embedded sets; both loaders."""
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
from test_data import as_rank, check_ranks, digest, options, refuses, toy  # noqa: F401  a fixture

COLUMNS = [*"A B C mu alpha homo lumo gap r2 zpve u0 u298 h298 g298 cv".split(),
           "u0_atom", "u298_atom", "h298_atom", "g298_atom"]  # as published


def rows_of(values, sizes):
    return [row.tolist() for row in values.split(sizes.tolist())]


def toy_texts(n=53):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (n,), generator=g)
    tokens = torch.randint(1, 40, (int(lengths.sum()),), generator=g, dtype=torch.int32)
    return TextSet("toy", tokens, lengths, torch.arange(n) % 2, 2, ("[PAD]",) * 40)


def toy_molecules(n=23):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 7, (n,), generator=g)
    numbers = torch.randint(1, 9, (int(sizes.sum()),), generator=g)
    positions = 2.5 * torch.randn(len(numbers), 3, generator=g, dtype=torch.float64)
    return MoleculeSet("toy", numbers, positions, sizes, torch.arange(n).double(),
                       data.atom_references())


def test_ood_and_predict_sets():
    texts, molecules = load_text("reviews", "val"), load_molecules("clusters", "train")
    texts = replace(texts, vocab=(*texts.vocab, "more"))
    args = options(["reviews_finance", "sst2"], predict="reviews_finance")
    sets = data.ood_sets(args, texts)
    assert [*sets] == ["reviews_finance"] and sets["reviews_finance"].vocab == texts.vocab
    assert data.predict_set(args, texts).labels.unique().tolist() == [-1]
    args.ood, args.predict = ["clusters_large", "qm9"], "clusters"
    assert [*data.ood_sets(args, molecules)] == ["clusters_large"]
    assert len(data.predict_set(args, molecules)) == 1000
    args.explicit = {"ood"}
    refuses("qm9.*gdb9.sdf .*is not there", data.ood_sets, args, molecules)
    refuses("'reviews.sst2' is unknown", data.ood_sets, options(["reviews+sst2"]), texts)
    refuses("cannot be compared with reviews", data.ood_sets, options(["x.npz"]), texts)


# ---- Word pieces ---------------------------------------------------------------------------------

VOCAB = (*data.SPECIAL, *"abcdeinou", *("##" + c for c in "abcdenosu"), "un", "##able", "want",
         "##want", "##ed", "runn", "##ing", "cafe", "!", ",", "'", "$")


def pieces(text, vocab=VOCAB):
    tokens, lengths = tokenise([text], vocab)
    assert lengths.tolist() == [len(tokens)] and tokens.dtype == torch.int32
    words = [vocab[i] for i in tokens]
    assert words[0] == "[CLS]" and words[-1] == "[SEP]"
    return words[1:-1]


@pytest.mark.parametrize("text, want", [
    ("UNwanted running", "un ##want ##ed runn ##ing"),  # the example of BERT's own tests
    ("unwantedX running", "[UNK] runn ##ing"),  # one unknown character loses the whole word
    ("Café CAFÉ cafe\u0301", "cafe cafe cafe"),
    ("un!able", "un ! [UNK]"),  # able is there as ##able alone
    ("unable,unable", "un ##able , un ##able"),
    ("a\u0000b\ufffdc\u200dd", "a ##b ##c ##d"),  # control characters vanish within a word
    ("a\u2028b\x85e", "a b ##e"),  # a line separator parts words; a control character does not
    ("can't $b", "c ##a ##n ' [UNK] $ b"), ("", ""), (" \u0301 ", ""),
    ("a" * 100, " ".join(["a"] + ["##a"] * 99)), ("a" * 101, "[UNK]"),
    ("a " * 300, "a " * 266),  # the first 268 pieces, with [CLS] and [SEP]
])
def test_word_pieces_by_hand(text, want):
    assert pieces(text) == want.split()


@pytest.mark.parametrize("text, want", [
    ("Hello,\tWorld!\u00a0it's 5$\u3000^_^ ~a`b", "hello , world ! it ' s 5 $ ^ _ ^ ~ a ` b"),
    ("naïve Ångström ÀÉÎ İstanbul ﬁne ½ ２", "naive angstrom aei istanbul ﬁne ½ ２"),
    ("日本語 is 漢字b 😀👍🏽 ok", "日 本 語 is 漢 字 b 😀👍🏽 ok"),
    ("tab\tnew\x0bline\x1cfs\u2009thin\u200bzero\u00adsoft", "tab newlinefs thinzerosoft"),
    ("¿qué? «no» — … “q”", "¿ que ? « no » — … “ q ”"),
    ("[CLS] [MASK] ##ing", "[ cls ] [ mask ] # # ing"),
    ("ｆｕｌｌ Ωmega ß ς", "ｆｕｌｌ ωmega ß ς"),
    ("\ufeffbom \u2029para x²+y³=π", "bom para x² + y³ = π"),
])
def test_words_are_those_of_google_s_basic_tokenizer(text, want):
    assert data._words(text) == want.split()


def test_vocabulary_rule():
    sentences = ["The cat , the dog", "a dog naïve the", "zebra cat yak", "yak"]
    vocab, letters = vocabulary(sentences), sorted({*",thecadognivzbryk"})
    assert vocab == (*data.SPECIAL, *letters, *("##" + c for c in letters),
                     "the", "cat", "dog", "yak")  # not zebra, not naive
    assert vocabulary(sentences, 40) == vocab[:40]
    assert "[UNK]" not in pieces("zebra naive", vocab)


# ---- SST-2 ---------------------------------------------------------------------------------------

SENTENCES = [f"sentence {'abcdefghij'[k % 10]} {k}" for k in range(40)]


def write_sst2(folder, train=None, dev="good film\t1\nbad film\t0\n",
               test="sentence\tlabel\nfine\t1\n"):
    rows = "".join(f"{sentence}\t{k % 2}\n" for k, sentence in enumerate(SENTENCES))
    (folder / "SST-2").mkdir(exist_ok=True)
    for file, text in (("train", "sentence\tlabel\n" + (rows if train is None else train)),
                       ("dev", "sentence\tlabel\n" + dev), ("test", test)):
        (folder / "SST-2" / f"{file}.tsv").write_text(text, newline="")


def words_of(dataset):
    return [" ".join(dataset.vocab[i] for i in row)
            for row in rows_of(dataset.tokens, dataset.lengths)]


def test_published_splits_where_test_is_labelled(tmp_path):
    write_sst2(tmp_path, test='sentence\tlabel\nit \'s "fine\t1\nawful\t0\ngood\t1')
    assert data.sst2_has_test_labels(tmp_path)
    train, val, test = (load_text("sst2", split, tmp_path) for split in ("train", "val", "test"))
    assert train.labels.tolist() == [0, 1] * 20
    assert (val.labels.tolist(), test.labels.tolist()) == ([1, 0], [1, 0, 1])
    assert train.vocab == val.vocab == test.vocab == vocabulary(SENTENCES)
    assert words_of(train)[3] == "[CLS] sentence d 3 [SEP]"
    like = load_text("reviews", "val")
    assert load_text("sst2", "test", tmp_path, like=like).vocab == like.vocab != train.vocab
    assert words_of(data.evenly(train, 4)) == [words_of(train)[k] for k in (0, 10, 20, 30)]


def test_splits_where_glue_withholds_the_labels(tmp_path):
    write_sst2(tmp_path, test="index\tsentence\n0\tfine\n")
    assert not data.sst2_has_test_labels(tmp_path)
    parts = [data._sst2(tmp_path / "SST-2", split) for split in ("train", "val", "test")]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    for (sentences, labels), rows in zip(parts, (sorted(order[4:]), order[:4])):
        assert sentences == [SENTENCES[k] for k in rows]
        assert labels.tolist() == [k % 2 for k in rows]
    assert parts[2][1].tolist() == [1, 0]  # dev.tsv


def test_vocabulary_file(tmp_path):
    write_sst2(tmp_path)
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    train = load_text("sst2", "train", tmp_path, vocab_file=file)
    assert train.vocab == VOCAB and train.tokens[:3].tolist() == [2, 1, 5]
    for text in ("[PAD]\n[UNK]\na\n", "a\n" + "\n".join(VOCAB)):
        file.write_text(text, encoding="utf-8")
        refuses("vocab.txt: expected BERT's", load_text, "sst2", "train", tmp_path, vocab_file=file)
    file.write_bytes(b"\xff\xfe")
    refuses("vocab.txt: unreadable", data.read_vocabulary, file)
    refuses("none.txt: expected BERT's", data.read_vocabulary, tmp_path / "none.txt")


@pytest.mark.parametrize("change, says", [
    (dict(train="fine\t1\nno label\n"), "train.tsv, line 3: 'no label'; expected sentence<TAB>lab"),
    (dict(train="fine\t1\ta\n"), "train.tsv, line 2"),
    (dict(train="fine\t1\nx\t2\n"), "train.tsv, line 3"),
    (dict(train="a\t1\nb\t0\n \t1\n"), "train.tsv, line 4"),
    (dict(train=""), "train.tsv is damaged.*0 rows"),
    (dict(test="text\tlabel\na\t1\n"), "test.tsv is damaged.*header 'text"),
])
def test_damaged_tsv(tmp_path, change, says):
    refuses("SST-2.test.tsv is not there.*https://", load_text, "sst2", "train", tmp_path)
    write_sst2(tmp_path, **change)
    refuses(says, load_text, "sst2", "train", tmp_path)
    write_sst2(tmp_path)
    (tmp_path / "SST-2" / "dev.tsv").write_text("good\t1\n")
    refuses(r"dev.tsv is damaged.*header 'good.t1'", load_text, "sst2", "val", tmp_path)


def test_windows_line_ends_odd_separators_and_a_byte_order_mark(tmp_path):
    write_sst2(tmp_path, dev="one\u2028two\t1\r\nthree\x85four\t0\r\n")
    dev = tmp_path / "SST-2" / "dev.tsv"
    for mark in (b"", "\ufeff".encode()):
        dev.write_bytes(mark + dev.read_bytes())
        assert load_text("sst2", "val", tmp_path).labels.tolist() == [1, 0]


def test_real_sst2(real_data):
    train = load_text("sst2", "train", real_data)
    val, test = (load_text("sst2", split, real_data, like=train) for split in ("val", "test"))
    assert (len(train), len(val), len(test)) == (65349, 2000, 872)
    assert train.labels.sum() + val.labels.sum() == 37569 and test.labels.sum() == 444
    assert words_of(test.select([1])) == ["[CLS] unflinching ##l ##y bleak and desperate [SEP]"]
    assert digest(test.tokens) == "506026e4a0da"  # as a transcription of Google's code has them


# ---- QM9 -----------------------------------------------------------------------------------------

# The first two published molecules: properties (Hartree energies) and atoms
PROPERTIES = {
    1: "157.7118 157.70997 157.70699 0. 13.21 -.3877 .1171 .5048 35.3641 .044749 -40.47893 "
       "-40.476062 -40.475117 -40.498597 6.469",
    2: "293.60975 293.54111 191.39397 1.6256 9.46 -.257 .0829 .3399 26.1563 .034358 -56.525887 "
       "-56.523026 -56.522082 -56.544961 6.316"}
ATOMS = {
    1: [("C", "-0.0127", "1.0858", "0.008"), ("H", "0.0022", "-0.006", "0.002"),
        ("H", "1.0117", "1.4638", "0.0003"), ("H", "-0.5408", "1.4475", "-0.8766"),
        ("H", "-0.5238", "1.4379", "0.9064")],
    2: [("N", "-0.0404", "1.0241", "0.0626"), ("H", "0.0173", "0.0125", "-0.0274"),
        ("H", "0.9158", "1.3587", "-0.0288"), ("H", "-0.5203", "1.3435", "-0.7755")]}
KCAL = {1: -395.999567, 2: -276.861344}  # atomisation energies at 0 K


def write_sdf(folder, omitted="  9 CC\n"):
    folder = folder / "QM9"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uncharacterized.txt").write_text("Molecules\n\n  Index SMILES\n" + omitted)
    rows, blocks = [",".join(["mol_id", *COLUMNS])], []
    for k in (1, 2):
        rows.append(",".join([f"gdb_{k}", *PROPERTIES[k].split(), *[str(KCAL[k])] * 4]))
        atoms = "".join(f"{float(x):10.4f}{float(y):10.4f}{float(z):10.4f} {s:3} 0  0  0  0\n"
                        for s, x, y, z in ATOMS[k])
        blocks.append(f"gdb_{k}\n  -OEChem-03231823253D\n\n{len(ATOMS[k]):3d}  0  0     0  0  0 "
                      f"999 V2000\n{atoms}  1  2  1  0\nM  END\n$$$$\n")
    (folder / "gdb9.sdf.csv").write_text("\n".join(rows) + "\n")
    (folder / "gdb9.sdf").write_text("".join(blocks))
    return folder.parent


def write_npz(folder, **change):
    arrays = dict(
        N=np.array([5, 4], np.int16), Z=np.array([6, 1, 1, 1, 1, 7, 1, 1, 1], np.int8),
        R=np.array([atom[1:] for k in (1, 2) for atom in ATOMS[k]], float),
        targets=np.array([[*map(float, PROPERTIES[k].split()), *[KCAL[k]] * 4] for k in (1, 2)]),
        target_names=np.array(COLUMNS))
    (folder / "QM9").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "QM9" / "qm9_subset.npz", **{**arrays, **change})
    return folder


def test_layouts_agree(tmp_path):
    npz, raw, eV = write_npz(tmp_path / "npz"), write_sdf(tmp_path / "raw"), 27.211386246
    for target in data.QM9_TARGETS:
        a, b = data._qm9(npz / "QM9", target), data._qm9(raw / "QM9", target)
        assert torch.equal(a.numbers, b.numbers) and torch.equal(a.sizes, b.sizes)
        assert torch.equal(a.positions, b.positions) and torch.equal(a.labels, b.labels)
        assert bool(b.references.any()) == (target in ("u0", "u298", "h298", "g298"))
    assert a.sizes.tolist() == [5, 4] and a.numbers.tolist() == [6, 1, 1, 1, 1, 7, 1, 1, 1]
    for target, want in (("u0", -40.47893 * eV), ("gap", 0.5048 * eV), ("zpve", 0.044749 * eV),
                         ("mu", 0.0), ("A", 157.7118), ("r2", 35.3641), ("cv", 6.469),
                         ("alpha", 13.21), ("u0_atom", (-40.47893 + 37.846772 + 2.001092) * eV)):
        assert data._qm9(raw / "QM9", target).labels[0].item() == pytest.approx(want, abs=1e-6)
    write_sdf(tmp_path / "raw", omitted="     1     C   C   -1.0\n\n")
    assert data._qm9(raw / "QM9", "u0").sizes.tolist() == [4]
    (raw / "QM9" / "uncharacterized.txt").unlink()
    (raw / "QM9" / "gdb9.sdf").touch()
    refuses("uncharacterized.txt is not there", data._qm9, raw / "QM9", "gap")


def test_published_split_of_the_whole_qm9(monkeypatch):
    n = 130831
    whole = MoleculeSet("qm9", torch.ones(n).long(), torch.zeros(n, 3).double(),
                        torch.ones(n).long(), torch.arange(n).double(), data.atom_references())
    asked = []
    monkeypatch.setattr(data, "_qm9", lambda _, target: asked.append(target) or whole)
    parts = [load_molecules("qm9", split).labels.long() for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [110000, 10000, 10831]
    assert data.predict_set(options(predict="qm9"), whole).labels.equal(parts[2].double())
    assert asked == ["u0", "u0", "u0", "gap"]
    assert torch.cat(parts).tolist() == np.random.default_rng(0).permutation(n).tolist()


def test_real_part_of_qm9(real_data):
    parts = [load_molecules("qm9", split, real_data) for split in ("train", "val", "test")]
    arrays = np.load(real_data / "QM9" / "qm9_subset.npz")
    order = np.random.default_rng(0).permutation(14308)
    assert [len(part) for part in parts] == [12030, 1093, 1185]
    u0 = arrays["targets"][order, arrays["target_names"].tolist().index("u0")]
    assert np.array_equal(torch.cat([part.labels for part in parts]), u0 * 27.211386246)


@pytest.mark.parametrize("change, says", [
    (dict(Z=np.full(9, 16, np.int8)), "qm9_subset.npz is damaged.*element 16; QM9 has H"),
    (dict(Z=np.array([6, 1, 1, 1, 1, 7, 1, 1, 0])), "element 0; QM9"),
    (dict(Z=np.ones(8, int)), r"damaged.*Z \(8,\).*9 atoms"),
    (dict(R=np.zeros((9, 2))), r"damaged.*\(9, 2\)"), (dict(N=np.array([5])), "damaged"),
    (dict(R=np.full((9, 3), np.nan)), "NaN or infinity"),
    (dict(targets=np.full((2, 19), np.inf)), "NaN or infinity"),
    (dict(targets=np.zeros((3, 19))), r"damaged.*\(3, 19\)"),
    (dict(target_names=np.array(["u1", *COLUMNS[1:]])), "no targets A"),
])
def test_damaged_npz(tmp_path, change, says):
    refuses(says, load_molecules, "qm9", "train", write_npz(tmp_path, **change))


@pytest.mark.parametrize("file, old, new, says", [
    ("gdb9.sdf", " N   0", " Si  0", "gdb9.sdf is damaged.*molecule 2: 'Si'"),
    ("gdb9.sdf", "  5  0  0", " 55  0  0", "gdb9.sdf is damaged.*molecule 1"),
    ("gdb9.sdf", "V2000", "V2000\n$$$$", "gdb9.sdf is damaged.*4 molecules, 2 rows"),
    ("gdb9.sdf", "1.4638", "1,4638", "gdb9.sdf is damaged.*1,4638"),
    ("gdb9.sdf.csv", "zpve", "ZPVE", "gdb9.sdf is damaged.*no targets zpve"),
    ("gdb9.sdf.csv", "gdb_2,", "gdb_2,1,", "molecule 2: 21 fields in gdb9.sdf.csv"),
    ("gdb9.sdf.csv", "13.21", "high", "molecule 1: .*high"),
])
def test_damaged_sdf(tmp_path, file, old, new, says):
    path = write_sdf(tmp_path) / "QM9" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refuses(says, load_molecules, "qm9", "train", tmp_path)


# ---- Loaders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, shuffle", [(1, True), (7, False), (7, True), (100, False)])
def test_text_batches(size, shuffle):
    dataset = toy_texts()
    loader = SequenceLoader(dataset, size, shuffle=shuffle, seed=3)
    batches, sentences = list(loader.epoch(2)), rows_of(dataset.tokens, dataset.lengths)
    assert len(batches) == len(loader) == -(-53 // size)
    for batch in batches:  # each row padded on its own
        length = int(dataset.lengths[batch.index].max())
        rows = [sentences[i] for i in batch.index]
        assert batch.tokens.tolist() == [row + [0] * (length - len(row)) for row in rows]
        assert batch.tokens.dtype == torch.int64
        assert torch.equal(batch.labels, dataset.labels[batch.index])
        assert batch.global_size == len(batch.index) <= size
    if not shuffle:
        order = torch.cat([batch.index for batch in batches]).tolist()
        assert order == sorted(range(53), key=lambda row: dataset.lengths[row])


def test_shuffling_by_length():
    dataset = toy_texts(1203)  # six chunks of 50 batches and a short one
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        # A chunk: 200 rows of the permutation, sorted by length, cut in 50
        generator = data._generator(seed, epoch)
        shuffled = torch.randperm(1203, generator=generator)
        chunks = [chunk[dataset.lengths[chunk].argsort(stable=True)]
                  for chunk in shuffled.split(200)]
        cut = [rows.tolist() for chunk in chunks for rows in chunk.split(4)]
        batches = SequenceLoader(dataset, 4, shuffle=True, seed=seed).epoch(epoch)
        want = [cut[i] for i in torch.randperm(301, generator=generator)]
        assert [batch.index.tolist() for batch in batches] == want


@pytest.mark.parametrize("size, cutoff, shuffle", [
    (1, 5.0, False), (5, 2.0, True), (23, 5.0, False), (50, 0.01, True), (6, 50.0, True)])
def test_molecule_batches(size, cutoff, shuffle):
    dataset = toy_molecules()
    loader = SequenceLoader(dataset, size, shuffle=shuffle, cutoff=cutoff)
    batches = list(loader.epoch(1))
    numbers, positions = (rows_of(t, dataset.sizes) for t in (dataset.numbers, dataset.positions))
    for batch in batches:
        graph, rows = batch.molecules, batch.index.tolist()
        owner = torch.tensor([k for k, row in enumerate(rows) for _ in numbers[row]])
        place = np.concatenate([positions[row] for row in rows])
        near = torch.tensor(cdist(place, place) < cutoff) & (owner[:, None] == owner)
        targets, sources = near.fill_diagonal_(False).nonzero(as_tuple=True)
        for got, want in ((graph.sources, sources), (graph.targets, targets),
                          (graph.molecule, owner), (graph.positions, torch.tensor(place).float()),
                          (batch.labels, dataset.labels[rows])):
            assert got.dtype == want.dtype and torch.equal(got, want)
        assert graph.numbers.tolist() == [z for row in rows for z in numbers[row]]
        assert graph.count == batch.global_size == len(rows)
    assert len(loader) == len(batches)


def test_edges_do_not_depend_on_the_pieces_they_are_found_in():
    dataset = load_molecules("clusters", "test").select(slice(300))
    alone = [torch.cat(part) for part in zip(*(data.find_edges(dataset.select([row]))
                                               for row in range(300)))]
    many = dataset.select(torch.arange(300).repeat(150))
    assert int((many.sizes**2).sum()) > 2**21  # pairs: more than one piece
    for got, want in zip(data.find_edges(many), alone):
        assert torch.equal(got, want.repeat(150))


CROPPED = partial(Loader, augment="crop_flip")


@pytest.mark.parametrize("make, dataset, world", [
    (Loader, toy(50), 2), (CROPPED, toy(50), 3), (SequenceLoader, toy_texts(), 8),
    (SequenceLoader, toy_molecules(), 3)], ids=["plain", "cropped", "texts", "molecules"])
def test_ranks_together_are_one_process(make, dataset, world, as_rank):  # noqa: F811
    check_ranks(as_rank, world, partial(make, dataset, 8, seed=5, shuffle=True))
    for few, size in ((dataset, world - 1), (dataset.select(slice(world - 1)), 16)):
        refuses(f"too few for {world} processes", make, few, size)
        assert len(make(few, size, whole=True)) == -(-len(few) // size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make, dataset", [
    (Loader, partial(toy, 50000, (3, 32, 32))),
    (CROPPED, partial(toy, 50000, (3, 32, 32))),  # over 2**31 pixels in all crops
    (SequenceLoader, toy_texts), (SequenceLoader, toy_molecules)])
def test_batches_on_a_gpu_are_those_of_the_cpu_without_waiting(make, dataset):
    dataset = dataset()
    loader, cpu = (make(dataset, -(-len(dataset) // 9), device, shuffle=True)
                   for device in ("cuda", "cpu"))
    batches = loader.epoch()
    got = [next(batches)]  # the order goes to the device once an epoch
    torch.cuda.set_sync_debug_mode("error")
    try:
        got += list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(got, cpu.epoch(), strict=True):
        first, second = ([*x[0], *x[1:]] if "molecules" in x._fields else x for x in (a, b))
        for x, y in zip(first, second):
            assert torch.equal(x.cpu(), y) if isinstance(y, torch.Tensor) else x == y


# ---- Embedded sets -------------------------------------------------------------------------------


def brute_energy(numbers, positions):
    """The documented formula, pair by pair."""
    terms = {1: (3.2, 0.35, 2.2), 6: (3.9, 0.76, 2.55), 7: (3.2, 0.71, 3.04), 8: (3.0, 0.66, 3.44)}
    free = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579}
    energy = sum(free[z] * 27.211386246 for z in numbers)
    for (i, a), (j, b) in combinations(zip(numbers, positions), 2):
        d = math.dist(a, b)
        (p, r, e), (q, s, f) = terms[i], terms[j]
        x = math.exp(-1.7 * (d - r - s))
        if d < 5:
            energy += (math.sqrt(p * q) * (1 + 0.2 * abs(e - f)) * (x * x - 2 * x)
                       * math.cos(math.pi * d / 10) ** 2)
    return energy


@pytest.mark.parametrize("name, low, high, want", [
    ("clusters", 4, 10, "6759429dc2d1"), ("clusters_large", 11, 16, "2785999ebf65")])
def test_embedded_molecules(name, low, high, want):
    train, val, test = (load_molecules(name, split) for split in ("train", "val", "test"))
    assert [len(s) for s in (train, val, test)] == [4000, 500, 1000]
    assert len(torch.cat([s.labels for s in (train, val, test)]).unique()) == 5500
    assert train.sizes.unique().tolist() == list(range(low, high + 1))
    assert train.numbers.unique().tolist() == [1, 6, 7, 8]
    assert torch.equal(train.references, data.atom_references("u0"))
    assert digest(torch.cat([test.numbers, test.sizes])) == want
    for row in range(0, 1000, 20):
        one = test.select([row])
        energy = brute_energy(one.numbers.tolist(), one.positions.tolist())
        assert one.labels.item() == pytest.approx(energy, abs=1e-8)
    free = torch.zeros(4000).double().index_add_(
        0, torch.arange(4000).repeat_interleave(train.sizes), train.references[train.numbers])
    bound = (train.labels - free) / train.sizes  # the part that there is to learn
    assert -16 < bound.min() and bound.max() < 2 and bound.std() > 0.5


@pytest.mark.parametrize("name, want, share", [
    ("reviews", "8deeadfb66fc", 0.5), ("reviews_finance", "667f532e50a2", 0)])
def test_embedded_texts(name, want, share):
    sets = [load_text(name, split) for split in ("train", "val", "test")]
    assert [len(own) for own in sets] == [6000, 500, 1000]
    assert len({text for own in sets for text in words_of(own)}) == 7500
    for own in sets:
        assert own.labels.double().mean() == pytest.approx(share, abs=0.05) and own.num_classes == 2
    assert digest(torch.cat([sets[2].tokens.long(), sets[2].lengths])) == want
