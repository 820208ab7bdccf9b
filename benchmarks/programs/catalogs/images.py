"""Examples that train on the small images that come with Keras."""

from pathlib import Path

import numpy as np

from benchmarks.programs.adapters import Program

_VISION = "examples/keras_io/vision"
_TF_VISION = "examples/keras_io/tensorflow/vision"
_GENERATIVE = "examples/keras_io/tensorflow/generative"
_NO_TMP = {"/tmp/": ""}
_SMALL_BATCH = {"batch_size": 16}


def _write_moving_digits(directory: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(directory / "moving_mnist.npy", rng.integers(0, 256, (20, 16, 12, 12)).astype("uint8"))


def _write_resnet(directory: Path) -> None:
    """Writes a stand-in for the module of residual networks that an example imports."""
    (directory / "resnet_cifar10_v2.py").write_text(
        "from keras import layers\n\n\n"
        "def stem(x):\n"
        "    x = layers.Conv2D(8, 3, padding='same', use_bias=False)(x)\n"
        "    return layers.ReLU()(layers.BatchNormalization()(x))\n\n\n"
        "def learner(x, num_blocks):\n"
        "    for _ in range(num_blocks + 1):\n"
        "        y = layers.Conv2D(8, 3, padding='same', use_bias=False)(x)\n"
        "        x = layers.Add()([x, layers.BatchNormalization()(y)])\n"
        "    return x\n"
    )


PROGRAMS = (
    Program(name="mnist_convnet", path=f"{_VISION}/mnist_convnet.py", constants={"batch_size": 32}),
    Program(
        name="autoencoder",
        path=f"{_VISION}/autoencoder.py",
        replace={"batch_size=128": "batch_size=32"},
    ),
    Program(
        name="attention_mil_classification",
        path=f"{_VISION}/attention_mil_classification.py",
        constants={"BAG_COUNT": 20, "VAL_BAG_COUNT": 10},
        replace=_NO_TMP,
    ),
    Program(
        name="cct",
        path=f"{_VISION}/cct.py",
        constants=_SMALL_BATCH,
        replace=_NO_TMP,
        examples=(50, 20),
    ),
    Program(
        name="convmixer",
        path=f"{_VISION}/convmixer.py",
        constants=_SMALL_BATCH,
        replace=_NO_TMP | {"filters=256": "filters=32", "depth=8": "depth=4"},
        examples=(60, 20),
        stop_before="def visualization_plot",
    ),
    Program(
        name="eanet",
        floatx="float32",
        path=f"{_VISION}/eanet.py",
        constants=_SMALL_BATCH | {"num_transformer_blocks": 2},
        examples=(50, 20),
    ),
    Program(
        name="knowledge_distillation",
        path=f"{_VISION}/knowledge_distillation.py",
        replace={"256": "16", "512": "16"},
    ),
    Program(
        name="mlp_image_classification",
        path=f"{_VISION}/mlp_image_classification.py",
        constants=_SMALL_BATCH | {"num_blocks": 2, "embedding_dim": 32, "image_size": 32},
        examples=(50, 20),
    ),
    Program(
        name="image_classification_with_vision_transformer",
        floatx="float32",
        path=f"{_VISION}/image_classification_with_vision_transformer.py",
        constants=_SMALL_BATCH
        | {"image_size": 24, "transformer_layers": 2, "mlp_head_units": [64, 32]},
        replace=_NO_TMP,
        examples=(50, 20),
    ),
    Program(
        name="token_learner",
        path=f"{_VISION}/token_learner.py",
        constants={"BATCH_SIZE": 16},
        replace=_NO_TMP | {"40000": "40"},
        examples=(60, 20),
    ),
    Program(
        name="siamese_contrastive",
        path=f"{_VISION}/siamese_contrastive.py",
        replace={"30000": "160"},
        examples=(240, 60),
    ),
    Program(
        name="supervised_contrastive_learning",
        floatx="float32",
        path=f"{_VISION}/supervised_contrastive_learning.py",
        # The program compares labels of shape [batch, 1] with their transpose.
        replace={"ops.squeeze(labels)": "labels"},
        constants=_SMALL_BATCH,
        examples=(36, 10),
        epochs=1,
    ),
    Program(
        name="simsiam",
        path=f"{_TF_VISION}/simsiam.py",
        constants={"BATCH_SIZE": 25, "PROJECT_DIM": 32, "LATENT_DIM": 16},
        files=_write_resnet,
        examples=(60, 20),
    ),
    Program(
        name="cutmix",
        path=f"{_TF_VISION}/cutmix.py",
        # MirroredStrategy cannot create the variable of Keras's random generator in a data set.
        replace={"set_random_seed(42)": "set_random_seed(42)\nkeras.random.uniform(())"},
        constants={"BATCH_SIZE": 16},
        examples=(40, 20),
        epochs=1,
    ),
    Program(
        name="mixup",
        floatx="float32",
        path=f"{_TF_VISION}/mixup.py",
        constants={"val_samples": 20, "BATCH_SIZE": 16},
        examples=(80, 20),
    ),
    Program(
        name="shiftvit",
        floatx="float32",
        path=f"{_TF_VISION}/shiftvit.py",
        constants={
            "batch_size": 16,
            "buffer_size": 64,
            "projected_dim": 24,
            "num_shift_blocks_per_stages": [2, 2, 2, 2],
            "num_div": 4,
        },
        # Keras no longer crops in evaluation.
        replace={"40000": "40", "config.input_shape[0] + 20": "config.image_size"},
        examples=(60, 20),
    ),
    Program(
        name="swim_transformers",
        floatx="float32",
        path=f"{_TF_VISION}/swim_transformers.py",
        # The current name in Keras.
        replace={"keras.utils.numerical_utils.": "keras.utils."},
        constants=_SMALL_BATCH,
        examples=(50, 20),
    ),
    Program(
        name="perceiver_image_classification",
        path=f"{_TF_VISION}/perceiver_image_classification.py",
        constants=_SMALL_BATCH
        | {
            "image_size": 16,
            "latent_dim": 16,
            "projection_dim": 16,
            "num_heads": 2,
            "num_transformer_blocks": 2,
        },
        examples=(50, 20),
    ),
    Program(
        name="involution",
        path=f"{_TF_VISION}/involution.py",
        replace={
            "(32, 256, 256, 3)": "(2, 32, 32, 3)",
            "    256": "    32",
            ".batch(256)": ".batch(32)",
        },
        examples=(60, 20),
        stop_before="vis_model = ",
    ),
    Program(
        name="metric_learning",
        path=f"{_TF_VISION}/metric_learning.py",
        # Keras's data sets now have a property of this name.
        replace={
            "num_batches=1000": "num_batches=6",
            "50000": "100",
            "self.num_batches": "self.count",
        },
        instead={"from sklearn": ""},
        stop_before="near_neighbours_per_example = ",
    ),
    Program(
        name="semantic_image_clustering",
        floatx="float32",
        path=f"{_TF_VISION}/semantic_image_clustering.py",
        constants={"batch_size": 24, "representation_dim": 32, "projection_units": 16},
        # Two losses require two targets.
        replace={"batch_size=512": "batch_size=32", "y=labels": "y=[labels, labels]"},
        examples=(60, 12),
        epochs=1,
        stop_before="clustering_probs = ",
    ),
    Program(
        name="conv_lstm",
        path=f"{_VISION}/conv_lstm.py",
        replace={"filters=64": "filters=8"},
        files=_write_moving_digits,
        stop_before="example = val_dataset",
    ),
    Program(
        name="pixelcnn",
        path="examples/keras_io/generative/pixelcnn.py",
        constants={"n_residual_blocks": 2},
        replace={"filters=128": "filters=16", "batch_size=128": "batch_size=16"},
        examples=(40, 14),
        stop_before="from IPython",
    ),
    Program(
        name="vae",
        floatx="float32",
        path=f"{_GENERATIVE}/vae.py",
        replace={"batch_size=128": "batch_size=32"},
        stop_before="def plot_latent_space",
    ),
    Program(
        name="wgan_gp",
        floatx="float32",
        path=f"{_GENERATIVE}/wgan_gp.py",
        constants={"BATCH_SIZE": 16},
        examples=(40, 10),
    ),
)
