"""data.py: texts and molecules: word pieces, published layouts, embedded sets, the loader."""
import hashlib
import math
import unicodedata
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import data
from data import (MoleculeSet, SequenceLoader, TextSet, load_molecules, load_text, tokenise,
                  vocabulary)
from test_data import as_rank, options, refuses  # noqa: F401  as_rank is a fixture

ENERGIES = ("u0", "u298", "h298", "g298")
COLUMNS = [*"A B C mu alpha homo lumo gap r2 zpve u0 u298 h298 g298 cv".split(),
           *(f"{energy}_atom" for energy in ENERGIES)]  # as published


def rows_of(values, sizes):
    return [row.tolist() for row in values.split(sizes.tolist())]


def toy_texts(n=53, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (n,), generator=g)
    tokens = torch.randint(1, 40, (int(lengths.sum()),), generator=g, dtype=torch.int32)
    return TextSet("toy", tokens, lengths, torch.arange(n) % 2, 2, ("[PAD]",) * 40)


def toy_molecules(n=23, seed=0, spread=2.5):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (n,), generator=g)
    atoms = int(sizes.sum())
    return MoleculeSet("toy", torch.randint(1, 9, (atoms,), generator=g),
                       spread * torch.randn(atoms, 3, generator=g, dtype=torch.float64), sizes,
                       torch.arange(n).double(), data.atom_references())


# ---- Sets ----------------------------------------------------------------------------------------


def test_ood_and_predict_sets():
    texts, molecules = load_text("reviews", "train"), load_molecules("clusters", "train")
    args = options(["reviews_finance", "sst2"], predict="reviews_finance")
    sets = data.ood_sets(args, texts)
    assert [*sets] == ["reviews_finance"] and sets["reviews_finance"].vocab == texts.vocab
    assert data.predict_set(args, texts).labels.unique().tolist() == [-1]
    args.ood, args.predict = ["clusters_large", "qm9"], "clusters"
    assert [*data.ood_sets(args, molecules)] == ["clusters_large"]
    assert len(data.predict_set(args, molecules)) == 1000
    args.explicit = {"ood"}
    refuses("qm9.*gdb9.sdf is not there", data.ood_sets, args, molecules)
    refuses("'reviews.sst2' is unknown", data.ood_sets, options(["reviews+sst2"]), texts)
    refuses("cannot be compared with reviews", data.ood_sets, options(["x.npz"]), texts)


# ---- Word pieces ---------------------------------------------------------------------------------

VOCAB = (*data.SPECIAL, *"abcdeinou", *("##" + c for c in "abcdenosu"), "un", "##able", "want",
         "##want", "##ed", "runn", "##ing", "cafe", "!", ",", "'", "[", "]", "sep", "中", "文", "$")


def pieces(text, vocab=VOCAB, max_length=268):
    tokens, lengths = tokenise([text], vocab, max_length)
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
    ("a中文b", "a 中 文 b"),
    ("a\tb\u00a0c\u3000d", "a b c d"),
    ("a\u0000b\ufffdc\u200dd", "a ##b ##c ##d"),  # control characters vanish within a word
    ("a\u2028b\x85e", "a b ##e"),  # a line separator parts words; a control character does not
    ("[SEP]", "[ sep ]"), ("can't $b", "c ##a ##n ' [UNK] $ b"), ("", ""), (" \u0301 ", ""),
    ("a" * 100, " ".join(["a"] + ["##a"] * 99)), ("a" * 101, "[UNK]"),
])
def test_word_pieces_by_hand(text, want):
    assert pieces(text) == want.split()


def bert_words(text):
    """Google's BasicTokenizer(do_lower_case=True), a character at a time."""
    out = []
    for c in text:
        kind = unicodedata.category(c)
        if c in "\t\n\r" or kind == "Zs":
            out.append(" ")
        elif c not in "\0\ufffd" and not kind.startswith("C"):
            cjk = 0x4E00 <= ord(c) <= 0x9FFF or 0x3400 <= ord(c) <= 0x4DBF
            out += [" ", c, " "] if cjk else [c]
    words = []
    for token in "".join(out).split():
        token = "".join(c for c in unicodedata.normalize("NFD", token.lower())
                        if unicodedata.category(c) != "Mn")
        current = ""
        for c in token:
            code = ord(c)
            if (33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
                    or unicodedata.category(c).startswith("P")):
                words += [current, c]
                current = ""
            else:
                current += c
        words.append(current)
    return [w for word in words for w in word.split()]


def bert_pieces(text, vocab):
    """Google's WordpieceTokenizer after bert_words."""
    out = []
    for word in bert_words(text):
        found, start = [], 0
        while start < len(word):
            ends = [e for e in range(len(word), start, -1)
                    if ("##" * (start > 0) + word[start:e]) in vocab]
            if not ends or len(word) > 100:
                found = ["[UNK]"]
                break
            found.append("##" * (start > 0) + word[start:ends[0]])
            start = ends[0]
        out += found
    return out


NASTY = ["Hello, World! it's 5$ ^_^ ~a`b", "naïve Ångström ÀÉÎ İstanbul ﬁne ½ ２", "日本語 is 漢字b",
         "tab\tnew\x0bline\x1cfs\u2009thin\u200bzero\u00adsoft", "emoji 😀👍🏽 ok",
         "¿qué? «no» — … “q”",
         "[CLS] [MASK] ##ing", "a" * 150, "ｆｕｌｌ Ωmega ß ς", "\ufeffbom \u2029para", "x²+y³=π"]


def test_word_pieces_against_the_original_algorithm():
    words = "hello world it s naive angstrom is fine bom para ok que no full omega emoji x y"
    vocab = vocabulary([*(words.split() * 2), *NASTY[:4]])
    known = set(vocab)
    for text in NASTY:
        assert pieces(text, vocab) == bert_pieces(text, known), text


def test_vocabulary_rule():
    sentences = ["The cat , the dog", "a dog naïve the", "zebra cat yak", "yak"]
    vocab = vocabulary(sentences)
    counts = Counter(w for s in sentences for w in bert_words(s))
    letters = sorted(set("".join(counts)))
    assert vocab[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert list(vocab[5:5 + len(letters)]) == letters
    assert list(vocab[5 + len(letters):5 + 2 * len(letters)]) == ["##" + c for c in letters]
    assert vocab[5 + 2 * len(letters):] == ("the", "cat", "dog", "yak")  # not zebra, not naive
    assert vocabulary(sentences, 40) == vocab[:40] and len(set(vocab)) == len(vocab)
    assert "[UNK]" not in pieces("zebra naive", vocab)


# ---- SST-2 ---------------------------------------------------------------------------------------


def write_sst2(folder, train=None, dev="good film\t1\nbad film\t0\n", test=None):
    rows = "".join(f"sentence {'abcdefghij'[k % 10]} {k}\t{k % 2}\n" for k in range(40))
    (folder / "SST-2").mkdir(exist_ok=True)
    test = "sentence\tlabel\nfine\t1\n" if test is None else test
    for file, text in (("train", "sentence\tlabel\n" + (rows if train is None else train)),
                       ("dev", "sentence\tlabel\n" + dev), ("test", test)):
        (folder / "SST-2" / f"{file}.tsv").write_text(text, newline="")
    return folder


def words_of(dataset):
    return [" ".join(dataset.vocab[i] for i in row)
            for row in rows_of(dataset.tokens, dataset.lengths)]


def test_published_splits_where_test_is_labelled(tmp_path):
    write_sst2(tmp_path, test='sentence\tlabel\nit \'s "fine\t1\nawful\t0\ngood\t1')
    assert data.sst2_has_test_labels(tmp_path)
    train, val, test = (load_text("sst2", split, tmp_path) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (40, 2, 3) and test.labels.tolist() == [1, 0, 1]
    assert train.labels.tolist() == [0, 1] * 20 and val.labels.tolist() == [1, 0]
    assert train.vocab == val.vocab == test.vocab == vocabulary(
        [f"sentence {'abcdefghij'[k % 10]} {k}" for k in range(40)])
    assert words_of(train)[3] == "[CLS] sentence d 3 [SEP]"
    assert load_text("sst2", "test", tmp_path, like=toy_special()).vocab == toy_special().vocab
    limited = load_text("sst2", "train", tmp_path, limit=4)
    assert limited.vocab == train.vocab
    assert words_of(limited) == [words_of(train)[k] for k in (0, 10, 20, 30)]


def toy_special():
    return replace(toy_texts(), vocab=(*data.SPECIAL, "a", "##a"))


def test_splits_where_glue_withholds_the_labels(tmp_path):
    write_sst2(tmp_path, test="index\tsentence\n0\tfine\n")
    assert not data.sst2_has_test_labels(tmp_path)
    train, val, test = (load_text("sst2", split, tmp_path) for split in ("train", "val", "test"))
    assert test.labels.tolist() == [1, 0]  # dev.tsv
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    assert [int(w.split()[-2].lstrip("#")) % 2 for w in words_of(val)] == val.labels.tolist()
    assert val.labels.tolist() == [k % 2 for k in order[:4]]
    assert train.labels.tolist() == [k % 2 for k in sorted(order[4:])]
    texts = words_of(train) + [" ".join(train.vocab[i] for i in row) for row in rows_of(
        *tokenise([f"sentence {'abcdefghij'[k % 10]} {k}" for k in order[:4]], train.vocab))]
    assert len(texts) == len(set(texts)) == 40


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


@pytest.mark.parametrize("rows, says", [
    ("fine\t1\nno label\n", "train.tsv, line 3: 'no label'; expected sentence<TAB>label"),
    ("fine\t1\ta\n", "train.tsv, line 2"), ("fine\t1\nx\t2\n", "train.tsv, line 3"),
    ("a\t1\nb\t0\n \t1\n", "train.tsv, line 4"), ("a\t1\n\nb\t1\n", "train.tsv, line 3"),
    ("", "train.tsv is damaged.*0 rows"),
])
def test_damaged_tsv(tmp_path, rows, says):
    refuses("SST-2.test.tsv is not there.*https://", load_text, "sst2", "train", tmp_path)
    write_sst2(tmp_path, train=rows)
    refuses(says, load_text, "sst2", "train", tmp_path)
    write_sst2(tmp_path, test="text\tlabel\na\t1\n")
    refuses("test.tsv is damaged.*header 'text", load_text, "sst2", "val", tmp_path)
    write_sst2(tmp_path)
    (tmp_path / "SST-2" / "dev.tsv").write_text("good\t1\n")
    refuses(r"dev.tsv is damaged.*header 'good.t1'", load_text, "sst2", "val", tmp_path)


def test_windows_line_ends_and_odd_separators(tmp_path):
    write_sst2(tmp_path, dev="one\u2028two\t1\r\nthree\x85four\t0\r\n")
    assert load_text("sst2", "val", tmp_path).labels.tolist() == [1, 0]
    dev = tmp_path / "SST-2" / "dev.tsv"
    dev.write_bytes("\ufeff".encode() + dev.read_bytes())  # a byte order mark
    assert load_text("sst2", "val", tmp_path).labels.tolist() == [1, 0]


def test_real_sst2(real_data):
    train = load_text("sst2", "train", real_data)
    val, test = (load_text("sst2", split, real_data, like=train) for split in ("val", "test"))
    assert (len(train), len(val), len(test)) == (65349, 2000, 872)
    assert test.labels.sum() == 444 and words_of(test.select([1])) == [
        "[CLS] unflinching ##l ##y bleak and desperate [SEP]"]
    lines = (real_data / "SST-2" / "dev.tsv").read_text().split("\n")[1:-1]
    known = set(train.vocab)
    for row in range(0, 872, 7):
        assert words_of(test.select([row]))[0].split()[1:-1] == bert_pieces(
            lines[row].split("\t")[0], known)
    assert train.labels.sum() + val.labels.sum() == 37569


# ---- QM9 -----------------------------------------------------------------------------------------

# The first two published molecules (properties and Hartree energies as published), and one made up.
PROPERTIES = {
    1: "157.7118 157.70997 157.70699 0. 13.21 -.3877 .1171 .5048 35.3641 .044749 -40.47893 "
       "-40.476062 -40.475117 -40.498597 6.469",
    2: "293.60975 293.54111 191.39397 1.6256 9.46 -.257 .0829 .3399 26.1563 .034358 -56.525887 "
       "-56.523026 -56.522082 -56.544961 6.316",
    3: "799.58812 437.90386 282.94545 1.8511 6.31 -.2928 .0687 .3615 19.0002 .021375 -76.404702 "
       "-76.401867 -76.400922 -76.422349 6.002"}
ATOMS = {
    1: [("C", "-0.0127", "1.0858", "0.008"), ("H", "0.0022", "-0.006", "0.002"),
        ("H", "1.0117", "1.4638", "0.0003"), ("H", "-0.5408", "1.4475", "-0.8766"),
        ("H", "-0.5238", "1.4379", "0.9064")],
    2: [("N", "-0.0404", "1.0241", "0.0626"), ("H", "0.0173", "0.0125", "-0.0274"),
        ("H", "0.9158", "1.3587", "-0.0288"), ("H", "-0.5203", "1.3435", "-0.7755")],
    3: [("O", "-0.0344", "0.9775", "0.0076"), ("H", "0.0648", "0.0206", "0.0015"),
        ("H", "0.8718", "1.3008", "0.0007")]}
FREE = {"C": -37.846772, "H": -0.500273, "N": -54.583861, "O": -75.064579}


def kcal(k, energy=10):
    """Atomisation energy at 0 K, kcal/mol."""
    bound = float(PROPERTIES[k].split()[energy]) - sum(FREE[atom[0]] for atom in ATOMS[k])
    return bound * 27.211386246 / 0.04336414


def write_sdf(folder, molecules=(1, 2, 3), omitted="  9 CC\n"):
    folder = folder / "QM9"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "uncharacterized.txt").write_text("Molecules\n\n  Index SMILES\n" + omitted)
    rows, blocks = [",".join(["mol_id", *COLUMNS])], []
    for k in molecules:
        rows.append(",".join([f"gdb_{k}", *PROPERTIES[k].split(), *[f"{kcal(k):.6f}"] * 4]))
        atoms = "".join(f"{float(x):10.4f}{float(y):10.4f}{float(z):10.4f} {s:3} 0  0  0  0\n"
                        for s, x, y, z in ATOMS[k])
        blocks.append(f"gdb_{k}\n  -OEChem-03231823253D\n\n{len(ATOMS[k]):3d}  0  0     0  0  0 "
                      f"999 V2000\n{atoms}  1  2  1  0\nM  END\n$$$$\n")
    (folder / "gdb9.sdf.csv").write_text("\n".join(rows) + "\n")
    (folder / "gdb9.sdf").write_text("".join(blocks))
    return folder.parent


def write_npz(folder, molecules=(1, 2, 3), **change):
    z = {"H": 1, "C": 6, "N": 7, "O": 8}
    atoms = [atom for k in molecules for atom in ATOMS[k]]
    arrays = dict(
        index=np.array(molecules), N=np.array([len(ATOMS[k]) for k in molecules], np.int16),
        Z=np.array([z[a[0]] for a in atoms], np.int8), R=np.array([a[1:] for a in atoms], float),
        targets=np.array([[*map(float, PROPERTIES[k].split()), *[kcal(k)] * 4]
                          for k in molecules]), target_names=np.array(COLUMNS))
    (folder / "QM9").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "QM9" / "qm9_subset.npz", **{**arrays, **change})
    return folder


def everything(folder, target):
    return data._qm9(folder / "QM9", target)


def test_layouts_agree(tmp_path):
    for target in data.QM9_TARGETS:
        a = everything(write_npz(tmp_path / "npz"), target)
        b = everything(write_sdf(tmp_path / "raw"), target)
        assert torch.equal(a.numbers, b.numbers) and torch.equal(a.sizes, b.sizes)
        assert torch.equal(a.positions, b.positions)
        torch.testing.assert_close(a.labels, b.labels, rtol=0, atol=1e-7)
    assert a.sizes.tolist() == [5, 4, 3]
    assert a.numbers.tolist() == [6, 1, 1, 1, 1, 7, 1, 1, 1, 8, 1, 1]
    eV = 27.211386246
    for target, want in (("u0", -40.47893 * eV), ("gap", 0.5048 * eV), ("zpve", 0.044749 * eV),
                         ("mu", 0.0), ("A", 157.7118), ("r2", 35.3641), ("cv", 6.469),
                         ("alpha", 13.21), ("u0_atom", (-40.47893 + 37.846772 + 2.001092) * eV)):
        dataset = everything(tmp_path / "raw", target)
        assert dataset.labels[0].item() == pytest.approx(want, abs=1e-6)
        assert bool(dataset.references.any()) == (target in ENERGIES)
    write_sdf(tmp_path / "raw", omitted="     1     C   C   -1.0\n\n")
    assert everything(tmp_path / "raw", "u0").sizes.tolist() == [4, 3]
    (tmp_path / "raw" / "QM9" / "uncharacterized.txt").unlink()
    (tmp_path / "raw" / "QM9" / "gdb9.sdf").touch()
    refuses("uncharacterized.txt is not there", everything, tmp_path / "raw", "gap")


def test_published_split_of_the_whole_qm9(monkeypatch):
    n = 130831
    whole = MoleculeSet("qm9", torch.ones(n, dtype=torch.int64), torch.zeros(n, 3).double(),
                        torch.ones(n, dtype=torch.int64), torch.arange(n).double(),
                        data.atom_references())
    monkeypatch.setattr(data, "_qm9", lambda *_: whole)
    parts = [load_molecules("qm9", split).labels.long() for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [110000, 10000, 10831]
    order = np.random.default_rng(0).permutation(n)
    assert torch.cat(parts).tolist() == order.tolist()
    assert torch.equal(torch.cat(parts).sort()[0], torch.arange(n))


def test_real_part_of_qm9(real_data):
    train, val, test = (load_molecules("qm9", split, real_data) for split in ("train", "val", "test"))
    whole = everything(real_data, "u0")
    order = torch.from_numpy(np.random.default_rng(0).permutation(14308))
    assert (len(train), len(val), len(test)) == (12030, 1093, 1185)
    joined = torch.cat([train.labels, val.labels, test.labels])
    assert torch.equal(joined, whole.labels[order])
    for part, first in ((train, 0), (val, 12030), (test, 13123)):
        assert torch.equal(part.positions, whole.select(order[first:first + len(part)]).positions)
    limited = load_molecules("qm9", "train", real_data, target="gap", limit=100)
    assert len(limited) == 100 and 0 < limited.labels.min() and limited.labels.max() < 20
    arrays = np.load(real_data / "QM9" / "qm9_subset.npz")
    names = arrays["target_names"].tolist()
    assert torch.equal(whole.labels,
                       torch.from_numpy(arrays["targets"][:, names.index("u0")]) * 27.211386246)


@pytest.mark.parametrize("change, says", [
    (dict(Z=np.full(12, 16, np.int8)), "qm9_subset.npz is damaged.*element 16; QM9 has H"),
    (dict(Z=np.array([6, 1, 1, 1, 1, 7, 1, 1, 1, 0, 1, 1])), "element 0; QM9"),
    (dict(Z=np.ones(11, int)), r"damaged.*Z \(11,\).*12 atoms"),
    (dict(R=np.zeros((12, 2))), r"damaged.*\(12, 2\)"), (dict(N=np.array([5, 4])), "damaged"),
    (dict(R=np.full((12, 3), np.nan)), "NaN or infinity"),
    (dict(targets=np.full((3, 19), np.inf)), "NaN or infinity"),
    (dict(targets=np.zeros((2, 19))), r"damaged.*\(2, 19\)"),
    (dict(target_names=np.array(["u1", *COLUMNS[1:]])), "no targets A"),
])
def test_damaged_npz(tmp_path, change, says):
    write_npz(tmp_path, **change)
    refuses(says, load_molecules, "qm9", "train", tmp_path)


@pytest.mark.parametrize("file, old, new, says", [
    ("gdb9.sdf", " N   0", " Si  0", "gdb9.sdf is damaged.*molecule 2: 'Si'"),
    ("gdb9.sdf", "  5  0  0", " 55  0  0", "gdb9.sdf is damaged.*molecule 1"),
    ("gdb9.sdf", "  5  0  0", "  x  0  0", "gdb9.sdf is damaged.*molecule 1"),
    ("gdb9.sdf", "V2000", "V2000\n$$$$", "gdb9.sdf is damaged.*6 molecules, 3 rows"),
    ("gdb9.sdf", "1.4638", "1,4638", "gdb9.sdf is damaged.*1,4638"),
    ("gdb9.sdf.csv", "zpve", "ZPVE", "gdb9.sdf is damaged.*no targets zpve"),
    ("gdb9.sdf.csv", "gdb_2,", "gdb_2,1,", "molecule 2: 21 fields in gdb9.sdf.csv"),
    ("gdb9.sdf.csv", "13.21", "high", "molecule 1: .*high"),
])
def test_damaged_sdf(tmp_path, file, old, new, says):
    write_sdf(tmp_path)
    path = tmp_path / "QM9" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refuses(says, load_molecules, "qm9", "train", tmp_path)


# ---- Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, match", [
    (lambda: load_text("sst", "train"), "'sst' is unknown.*reviews.*sst2"),
    (lambda: load_text("clusters", "train"), "'clusters' is unknown"),
    (lambda: load_text("reviews", "dev"), "split 'dev'"),
    (lambda: load_text("reviews", "test", limit=0), "limit 0"),
    (lambda: load_molecules("qm8", "train"), "'qm8' is unknown.*clusters.*qm9"),
    (lambda: load_molecules("clusters", "all"), "split 'all'"),
    (lambda: load_molecules("clusters", "test", limit=-1), "limit -1"),
    (lambda: load_molecules("clusters", "test", target="gap"), "'gap' is unknown.*u0"),
    (lambda: load_molecules("qm9", "test", "/nowhere"), "nowhere.QM9.gdb9.sdf is not there.*https"),
    (lambda: load_molecules("qm9", "test", target="U"), "target 'U' is unknown.*u298"),
    (lambda: SequenceLoader(toy_texts(), 0), "batches of 0"),
    (lambda: SequenceLoader(toy_texts().select([]), 4), "0 rows"),
])
def test_mistakes_are_one_line(call, match):
    refuses(match, call)


# ---- Loader --------------------------------------------------------------------------------------


def check_texts(batch, dataset, length=0):
    """The batch is its rows, each padded on its own."""
    sentences = rows_of(dataset.tokens, dataset.lengths)
    rows = [sentences[i] for i in batch.index]
    assert batch.tokens.dtype == torch.int64
    assert batch.tokens.tolist() == [row + [0] * (length - len(row)) for row in rows]
    assert torch.equal(batch.labels, dataset.labels[batch.index])


def check_molecules(batch, dataset, cutoff=5.0):
    """The batch is its molecules one after the other, and its edges those of a double loop."""
    graph, first = batch.molecules, 0
    numbers, positions = (rows_of(t, dataset.sizes) for t in (dataset.numbers, dataset.positions))
    edges, owner = [], []
    for count, i in enumerate(batch.index.tolist()):
        n = len(numbers[i])
        edges += [(first + b, first + a) for a in range(n) for b in range(n)
                  if a != b and math.dist(positions[i][a], positions[i][b]) < cutoff]
        owner += [count] * n
        first += n
    assert graph.numbers.tolist() == [z for i in batch.index for z in numbers[i]]
    want = torch.tensor([x for i in batch.index for x in positions[i]]).view(-1, 3)
    assert graph.positions.dtype == torch.float32 and torch.equal(graph.positions, want)
    assert graph.molecule.tolist() == owner and graph.count == len(batch.index)
    assert [*zip(graph.sources.tolist(), graph.targets.tolist())] == edges
    assert graph.sources.dtype == graph.targets.dtype == torch.int64
    assert batch.labels.dtype == torch.float64
    assert torch.equal(batch.labels, dataset.labels[batch.index])


@pytest.mark.parametrize("size, shuffle", [(1, True), (7, False), (7, True), (100, False)])
def test_text_batches(size, shuffle):
    dataset = toy_texts()
    loader = SequenceLoader(dataset, size, shuffle=shuffle, seed=3)
    batches = list(loader.epoch(2))
    assert len(batches) == len(loader) == -(-53 // size)
    for batch in batches:
        check_texts(batch, dataset, int(dataset.lengths[batch.index].max()))
        assert batch.global_size == len(batch.index) <= size
    order = torch.cat([batch.index for batch in batches]).tolist()
    assert sorted(order) == list(range(53))
    if not shuffle:
        assert order == sorted(range(53), key=lambda row: dataset.lengths[row])


def test_shuffling_by_length():
    dataset = toy_texts(1203)
    loader = SequenceLoader(dataset, 4, shuffle=True)  # six chunks of 50 batches and a short one
    a, b, again = (list(loader.epoch(epoch)) for epoch in (0, 1, 0))
    order = [torch.cat([batch.index for batch in batches]) for batches in (a, b, again)]
    assert torch.equal(order[0], order[2]) and not torch.equal(order[0], order[1])
    assert not torch.equal(order[0], torch.cat([x.index for x in SequenceLoader(
        dataset, 4, shuffle=True, seed=1).epoch(0)]))
    # A chunk: 200 rows of the permutation, sorted by length, cut in 50
    generator = data._generator(0, 0)
    shuffled = torch.randperm(1203, generator=generator)
    chunks = [chunk[dataset.lengths[chunk].argsort(stable=True)] for chunk in shuffled.split(200)]
    cut = [rows for chunk in chunks for rows in chunk.split(4)]
    want = [cut[i].tolist() for i in torch.randperm(301, generator=generator)]
    assert [batch.index.tolist() for batch in a] == want
    lengths = torch.stack([batch.tokens.new_tensor(batch.tokens.shape[1]) for batch in a])
    assert (lengths.diff() < 0).sum() > 50  # not from short to long


@pytest.mark.parametrize("size, cutoff, shuffle", [
    (1, 5.0, False), (5, 2.0, True), (23, 5.0, False), (50, 0.01, True), (6, 50.0, True)])
def test_molecule_batches(size, cutoff, shuffle):
    dataset = toy_molecules()
    loader = SequenceLoader(dataset, size, shuffle=shuffle, cutoff=cutoff)
    batches = list(loader.epoch(1))
    for batch in batches:
        check_molecules(batch, dataset, cutoff)
        assert batch.global_size == len(batch.index)
    order = torch.cat([batch.index for batch in batches])
    assert torch.equal(order.sort()[0], torch.arange(23)) and len(loader) == len(batches)
    assert torch.equal(order, torch.arange(23)) != shuffle


def test_edges_do_not_depend_on_the_pieces_they_are_found_in():
    dataset = load_molecules("clusters", "test", limit=300)
    sources, targets, edges = data.find_edges(dataset)
    parts = [data.find_edges(dataset.select([row])) for row in range(300)]
    for got, want in zip((sources, targets, edges), map(torch.cat, zip(*parts))):
        assert torch.equal(got, want)
    many = dataset.select(torch.arange(300).repeat(150))  # over 2**21 pairs
    assert int((many.sizes**2).sum()) > 2**21
    for got, want in zip(data.find_edges(many), (sources, targets, edges)):
        assert torch.equal(got, want.repeat(150))


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("dataset", [toy_texts(), toy_molecules()], ids=["texts", "molecules"])
def test_pieces_are_those_of_one_process(dataset, world, as_rank):  # noqa: F811
    one, ranks = list(SequenceLoader(dataset, 8, shuffle=True, seed=5).epoch(4)), []
    for rank in range(world):
        as_rank(rank, world)
        ranks.append(list(SequenceLoader(dataset, 8, shuffle=True, seed=5).epoch(4)))
    for whole, *parts in zip(one, *ranks):
        sizes = [len(part.index) for part in parts]
        assert sizes == [len(rows) for rows in np.array_split(np.arange(len(whole.index)), world)]
        assert torch.equal(torch.cat([part.index for part in parts]), whole.index)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert {part.global_size for part in parts} == {len(whole.index)}
        if isinstance(dataset, TextSet):  # padded as the whole batch is, where a piece is short too
            assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
            continue
        for part in parts:
            check_molecules(part, dataset)
    alone = list(SequenceLoader(dataset, 8, shuffle=True, seed=5, whole=True).epoch(4))
    assert all(torch.equal(a.index, b.index) for a, b in zip(alone, one, strict=True))
    refuses("too few for", SequenceLoader, dataset, world - 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dataset", [toy_texts(), toy_molecules()], ids=["texts", "molecules"])
def test_batches_on_a_gpu_are_those_of_the_cpu_without_waiting(dataset):
    loader, cpu = (SequenceLoader(dataset, 5, device, shuffle=True) for device in ("cuda", "cpu"))
    batches = loader.epoch()
    got = [next(batches)]  # the order goes to the device once an epoch
    torch.cuda.set_sync_debug_mode("error")
    try:
        got += list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(got, cpu.epoch(), strict=True):
        first = [*a[0], *a[1:]] if isinstance(dataset, MoleculeSet) else a
        second = [*b[0], *b[1:]] if isinstance(dataset, MoleculeSet) else b
        for x, y in zip(first, second):
            assert torch.equal(x.cpu(), y) if isinstance(x, torch.Tensor) else x == y


# ---- Embedded sets -------------------------------------------------------------------------------


def brute_energy(numbers, positions):
    """The documented formula, pair by pair."""
    terms = {1: (3.2, 0.35, 2.2), 6: (3.9, 0.76, 2.55), 7: (3.2, 0.71, 3.04), 8: (3.0, 0.66, 3.44)}
    free = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579}
    energy = sum(free[z] * 27.211386246 for z in numbers)
    for i in range(len(numbers)):
        for j in range(i):
            d = math.dist(positions[i], positions[j])
            (p, r, e), (q, s, f) = terms[numbers[i]], terms[numbers[j]]
            x = math.exp(-1.7 * (d - r - s))
            if d < 5:
                energy += (math.sqrt(p * q) * (1 + 0.2 * abs(e - f)) * (x * x - 2 * x)
                           * math.cos(math.pi * d / 10) ** 2)
    return energy


@pytest.mark.parametrize("name, low, high", [("clusters", 4, 10), ("clusters_large", 11, 16)])
def test_embedded_molecules(name, low, high):
    train, val, test = (load_molecules(name, split) for split in ("train", "val", "test"))
    assert [len(s) for s in (train, val, test)] == [4000, 500, 1000]
    assert len(torch.cat([s.labels for s in (train, val, test)]).unique()) == 5500
    assert train.sizes.unique().tolist() == list(range(low, high + 1))
    assert train.numbers.unique().tolist() == [1, 6, 7, 8]
    assert torch.equal(train.references, data.atom_references("u0"))
    for row in range(0, 1000, 20):
        one = test.select([row])
        energy = brute_energy(one.numbers.tolist(), one.positions.tolist())
        assert one.labels.item() == pytest.approx(energy, abs=1e-8)
    free = torch.zeros(4000).double().index_add_(
        0, torch.arange(4000).repeat_interleave(train.sizes), train.references[train.numbers])
    bound = (train.labels - free) / train.sizes  # the part that there is to learn
    assert -16 < bound.min() and bound.max() < 2 and bound.std() > 0.5
    assert torch.equal(load_molecules(name, "val", limit=5).labels, val.labels[::100])


DIGESTS = {"reviews": "8deeadfb66fc", "reviews_finance": "667f532e50a2",
           "clusters": "6759429dc2d1", "clusters_large": "2785999ebf65"}


@pytest.mark.parametrize("name", ["reviews", "reviews_finance", "clusters", "clusters_large"])
def test_embedded_sets_are_the_same_every_time(name):
    load, cached = ((load_text, data._embedded_text) if name in data.TEXTS else
                    (load_molecules, data._embedded_molecules))
    first = load(name, "test")
    cached.cache_clear(), torch.manual_seed(123)
    again = load(name, "test")
    values = (first.tokens, again.tokens) if name in data.TEXTS else (
        first.positions, again.positions)
    assert torch.equal(*values) and torch.equal(first.labels, again.labels)
    held = first.tokens if name in data.TEXTS else first.numbers
    held = torch.cat([held.long(), first.lengths if name in data.TEXTS else first.sizes])
    assert hashlib.sha256(held.numpy().tobytes()).hexdigest()[:12] == DIGESTS[name]
