"""Examples that train on text and speech."""

import random
from pathlib import Path

from benchmarks.programs import made
from benchmarks.programs.adapters import Program

_NLP = "examples/keras_io/nlp"
_TF_NLP = "examples/keras_io/tensorflow/nlp"
_AUDIO = "examples/keras_io/tensorflow/audio"
# Keras's own function no longer accepts a tensor of repetitions.
_TILE = {"ops.tile(mask, mult)": '__import__("tensorflow").tile(mask, mult)'}


def _write_reviews(directory: Path) -> None:
    made.write_reviews(directory, per_class=20)


def _write_french(directory: Path) -> None:
    made.write_pairs(directory / "fra.txt", 60, columns=3)


def _write_spanish(directory: Path) -> None:
    made.write_pairs(directory / "spa-eng" / "spa.txt", 100, columns=2)


def _write_newsgroups(directory: Path) -> None:
    rng = random.Random(0)
    for topic in ("alt.atheism", "comp.graphics", "sci.space"):
        for number in range(38980, 39006):
            words = made.make_sentence(rng, 30) + f" {topic.rpartition('.')[2]}"
            lines = [f"header: {index}" for index in range(10)] + [words]
            made.write_lines(directory / "20_newsgroup" / topic / str(number), lines)
    vectors = [
        f"{word} " + " ".join(f"{rng.gauss(0, 1):.3f}" for _ in range(100)) for word in made.WORDS
    ]
    made.write_lines(directory / "glove.6B.100d.txt", vectors)


def _write_book(directory: Path) -> None:
    rng = random.Random(0)
    made.write_lines(directory / "nietzsche.txt", [made.make_sentence(rng, 80)])


def _make_named_entities() -> dict:
    rng = random.Random(0)

    def make_part(count: int):
        records = []
        for _ in range(count):
            tokens = made.make_sentence(rng, rng.randint(3, 12)).split()
            records.append({"tokens": tokens, "ner_tags": [len(token) % 9 for token in tokens]})
        return _Records(records)

    return {"train": make_part(70), "validation": make_part(20)}


class _Records(list):
    """Records that return a column by its name."""

    def __getitem__(self, key):
        if isinstance(key, str):
            return [record[key] for record in self]
        return super().__getitem__(key)


def _write_speakers(directory: Path) -> None:
    root = directory / "16000_pcm_speeches"
    for speaker in ("first", "second", "third"):
        names = [f"{index}.wav" for index in range(10)]
        made.write_sounds(root / "audio" / speaker, names, samples=16000)
    made.write_sounds(root / "noise" / "other", ["noise.wav"], samples=32000)


def _write_readings(directory: Path) -> None:
    rng = random.Random(0)
    root = directory / "datasets" / "LJSpeech-1.1"
    names = [f"LJ{index:03}" for index in range(20)]
    made.write_sounds(root / "wavs", [f"{name}.wav" for name in names], samples=8000)
    lines = [f"{name}|x|{made.make_sentence(rng, 4)}" for name in names]
    (root / "metadata.csv").write_text("\n".join(lines) + "\n")


PROGRAMS = (
    Program(
        name="text_generation_with_miniature_gpt",
        path="examples/keras_io/generative/text_generation_with_miniature_gpt.py",
        constants={
            "vocab_size": 20,
            "maxlen": 20,
            "embed_dim": 32,
            "feed_forward_dim": 32,
            "batch_size": 16,
            "num_tokens_generated": 3,
        },
        replace=_TILE,
        files=_write_reviews,
    ),
    Program(
        name="addition_rnn",
        path=f"{_NLP}/addition_rnn.py",
        constants={"TRAINING_SIZE": 120, "epochs": 3},
        replace={"range(10)": "range(2)"},
    ),
    Program(
        name="bidirectional_lstm_imdb",
        path=f"{_NLP}/bidirectional_lstm_imdb.py",
        constants={"max_features": 200, "maxlen": 30},
    ),
    Program(
        name="lstm_seq2seq",
        path=f"{_NLP}/lstm_seq2seq.py",
        constants={"batch_size": 16, "latent_dim": 16},
        replace={"range(20)": "range(1)"},
        files=_write_french,
        stop_before="model = keras.models.load_model",
    ),
    Program(
        name="neural_machine_translation_with_transformer",
        path=f"{_NLP}/neural_machine_translation_with_transformer.py",
        constants={
            "vocab_size": 60,
            "batch_size": 16,
            "embed_dim": 16,
            "latent_dim": 32,
            "num_heads": 2,
        },
        # The example writes os[...] instead of os.environ[...].
        replace=_TILE
        | {'os["KERAS_BACKEND"]': 'os.environ["KERAS_BACKEND"]', "range(30)": "range(2)"},
        files=_write_spanish,
    ),
    Program(
        name="end_to_end_mlm_with_bert",
        path=f"{_TF_NLP}/end_to_end_mlm_with_bert.py",
        constants={
            "MAX_LEN": 24,
            "BATCH_SIZE": 16,
            "VOCAB_SIZE": 30,
            "EMBED_DIM": 32,
            "NUM_HEAD": 2,
            "FF_DIM": 32,
        },
        files=_write_reviews,
        needs=("pandas",),
    ),
    Program(
        name="ner_transformers",
        floatx="float32",
        path=f"{_TF_NLP}/ner_transformers.py",
        # The current names in Keras; the workers share a directory.
        replace={
            "keras.ops.backend.shape": "keras.ops.shape",
            "keras.backend.cast": "keras.ops.cast",
            "new_shape=": "newshape=",
            'os.mkdir("data")': 'os.makedirs("data", exist_ok=True)',
        },
        constants={"vocab_size": 100},
        instead={
            "from datasets import": "",
            "conll_data = load_dataset": "conll_data = made_named_entities",
        },
        names={"made_named_entities": _make_named_entities()},
        stop_before="def calculate_metrics",
    ),
    Program(
        name="pretrained_word_embeddings",
        path=f"{_TF_NLP}/pretrained_word_embeddings.py",
        # np.fromstring can no longer do this, and the words must be in the synthetic texts.
        replace={
            'np.fromstring(coefs, "f", sep=" ")': "np.array(coefs.split(), 'f')",
            '["the", "cat", "sat", "on", "the", "mat"]': '["the", "movie"]',
            "batch_size=128": "batch_size=16",
        },
        files=_write_newsgroups,
    ),
    Program(
        name="text_classification_from_scratch",
        path=f"{_TF_NLP}/text_classification_from_scratch.py",
        constants={
            "max_features": 60,
            "embedding_dim": 16,
            "sequence_length": 120,
            "batch_size": 8,
        },
        files=_write_reviews,
    ),
    Program(
        name="lstm_character_level_text_generation",
        path="examples/keras_io/tensorflow/generative/lstm_character_level_text_generation.py",
        constants={"epochs": 2, "batch_size": 32},
        replace={"range(400)": "range(2)", "[0.2, 0.5, 1.0, 1.2]": "[1.0]"},
        files=_write_book,
    ),
    Program(
        name="speaker_recognition_using_cnn",
        path=f"{_AUDIO}/speaker_recognition_using_cnn.py",
        constants={"BATCH_SIZE": 8, "VALID_SPLIT": 0.2},
        files=_write_speakers,
        epochs=1,
        stop_before="SAMPLES_TO_DISPLAY = ",
    ),
    Program(
        name="transformer_asr",
        path=f"{_AUDIO}/transformer_asr.py",
        constants={"max_target_len": 40},
        replace={
            "pad_len = 2754": "pad_len = 100",
            "bs=64": "bs=8",
            "* 0.99": "* 0.8",
            "num_hid=200": "num_hid=16",
            "num_feed_forward=400": "num_feed_forward=16",
        },
        files=_write_readings,
    ),
)
