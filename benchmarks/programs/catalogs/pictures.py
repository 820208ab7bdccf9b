"""Examples that train on images in files, or from TensorFlow Datasets."""

import json
import random
from pathlib import Path

import numpy as np

from benchmarks.programs import made
from benchmarks.programs.adapters import Program
from benchmarks.programs.made import MadeTfds

_VISION = "examples/keras_io/vision"
_TF_VISION = "examples/keras_io/tensorflow/vision"
_GENERATIVE = "examples/keras_io/tensorflow/generative"
_NO_TMP = {"/tmp/": ""}
_NO_WEIGHTS = {'weights="imagenet"': "weights=None"}


def _write_captchas(directory: Path) -> None:
    rng = random.Random(0)
    names = [f"{made.make_name(rng, 5)}.png" for _ in range(44)]
    made.write_images(directory / "captcha_images_v2", names, (50, 200))


def _write_pets(directory: Path) -> None:
    for seed, folder in enumerate(("Cat", "Dog")):
        names = ["6779.jpg", *(f"{index}.jpg" for index in range(24))]
        made.write_images(directory / "PetImages" / folder, names, (40, 44, 3), seed=seed)


def _write_pet_masks(directory: Path) -> None:
    names = [f"pet_{index:02}" for index in range(30)]
    made.write_images(directory / "images", [f"{name}.jpg" for name in names], (40, 40, 3))
    made.write_labels_as_images(
        directory / "annotations" / "trimaps",
        [f"{name}.png" for name in names],
        (40, 40),
        classes=3,
        first=1,
    )


def _write_people(directory: Path) -> None:
    folder = directory / "instance-level_human_parsing/instance-level_human_parsing/Training"
    names = [f"{index:02}.png" for index in range(16)]
    made.write_images(folder / "Images", names, (72, 72, 3))
    made.write_labels_as_images(folder / "Category_ids", names, (72, 72), classes=20)


def _write_low_light(directory: Path) -> None:
    names = [f"{index:02}.png" for index in range(18)]
    for part, kinds in (("our485", ("low", "high")), ("eval15", ("low", "high"))):
        for seed, kind in enumerate(kinds):
            made.write_images(
                directory / "lol_dataset" / part / kind, names, (40, 40, 3), seed=seed
            )


def _write_celebrities(directory: Path) -> None:
    names = [f"{index:02}.jpg" for index in range(40)]
    made.write_images(directory / "celeba_gan" / "faces", names, (64, 64, 3))


def _write_segmentation_set(directory: Path) -> None:
    names = [f"{index:02}.jpg" for index in range(20)]
    for part in ("train", "test"):
        folder = directory / "BSR" / "BSDS500" / "data" / "images" / part
        made.write_images(folder, names, (60, 60, 3))


def _write_triplets(directory: Path) -> None:
    names = [f"{index:02}.jpg" for index in range(20)]
    for seed, side in enumerate(("left", "right")):
        made.write_images(directory / ".keras" / side, names, (40, 40, 3), seed=seed)


def _write_captions(directory: Path) -> None:
    rng = random.Random(0)
    names = [f"{index:02}.jpg" for index in range(20)]
    made.write_images(directory / "Flicker8k_Dataset", names, (64, 64, 3))
    made.write_lines(
        directory / "Flickr8k.token.txt",
        [
            f"{name}#{index}\t{made.make_sentence(rng, rng.randint(6, 12))}"
            for name in names
            for index in range(5)
        ],
    )


def _write_shapes(directory: Path) -> None:
    rng = np.random.default_rng(0)
    root = directory / "PartAnnotation"
    labels = ["wing", "body", "tail", "engine"]
    part = {"directory": "02691156", "lables": labels, "colors": ["r", "g", "b", "k"]}
    made.write_lines(root / "metadata.json", [json.dumps({"Airplane": part})])
    (root / "02691156" / "points").mkdir(parents=True)
    for label in labels:
        (root / "02691156" / "points_label" / label).mkdir(parents=True)
    for index in range(30):
        points = rng.normal(size=(80, 3))
        np.savetxt(root / "02691156" / "points" / f"{index:02}.pts", points)
        owners = rng.integers(0, 4, 80)
        for number, label in enumerate(labels):
            file = root / "02691156" / "points_label" / label / f"{index:02}.seg"
            np.savetxt(file, owners == number, fmt="%d")


def _write_video_features(directory: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("train", 50), ("test", 20)):
        labels = rng.integers(0, 5, (count, 1))
        features = rng.normal(size=(count, 20, 64)) + labels[..., None]
        np.save(directory / f"{name}_data.npy", features.astype("float32"))
        np.save(directory / f"{name}_labels.npy", labels)
        made.write_lines(
            directory / f"{name}.csv",
            ["video_name,tag", *(f"v{i}.avi,kind{label[0]}" for i, label in enumerate(labels))],
        )


PROGRAMS = (
    Program(
        name="gradient_centralization",
        floatx="float32",
        path=f"{_VISION}/gradient_centralization.py",
        constants={"batch_size": 8},
        replace={"(300, 300, 3)": "(150, 150, 3)"},
        names={"tfds": MadeTfds((150, 150, 3), 2, [20, 8])},
        epochs=1,
    ),
    Program(
        name="learnable_resizer",
        rounds_to="float32",
        path=f"{_VISION}/learnable_resizer.py",
        constants={"INP_SIZE": (48, 48), "TARGET_SIZE": (32, 32), "BATCH_SIZE": 8},
        names={"tfds": MadeTfds((50, 50, 3), 2, [18, 10])},
        epochs=1,
    ),
    Program(
        name="fixres",
        path=f"{_VISION}/fixres.py",
        constants={"smaller_size": 32, "bigger_size": 56, "batch_size": 8},
        # Deterministic kernels require a seed.
        replace={
            "min_object_covered=0,": "min_object_covered=0, seed=1,",
            "range(25)": "range(8)",
        },
        names={"tfds": MadeTfds((60, 60, 3), 5, [18, 10])},
        epochs=1,
    ),
    Program(
        name="mobilevit",
        floatx="float32",
        path=f"{_TF_VISION}/mobilevit.py",
        constants={"image_size": 64, "resize_bigger": 68, "batch_size": 8},
        replace=_NO_TMP | {"num_blocks=4": "num_blocks=1", "num_blocks=3": "num_blocks=1"},
        names={"tfds": MadeTfds((70, 70, 3), 5, [20, 10])},
        epochs=1,
        stop_before="tf.saved_model.save",
    ),
    Program(
        name="deit",
        floatx="float32",
        path=f"{_TF_VISION}/deit.py",
        constants={"RESOLUTION": 32, "NUM_LAYERS": 2, "BATCH_SIZE": 8},
        replace={"(2, 224, 224, 3)": "(2, 32, 32, 3)"},
        instead={
            # The real teacher is a download with 212 million parameters.
            "keras.layers.TFSMLayer(": "_images = keras.Input((32, 32, 3))\n"
            "bit_teacher_flowers = keras.Model(_images, {'dense': layers.Dense(5)("
            "layers.GlobalAveragePooling2D()(layers.Rescaling(1 / 255)(_images)))})"
        },
        names={"tfds": MadeTfds((40, 40, 3), 5, [20, 10])},
    ),
    Program(
        name="image_classification_efficientnet_fine_tuning",
        floatx="float32",
        path=f"{_VISION}/image_classification_efficientnet_fine_tuning.py",
        constants={"IMG_SIZE": 32, "BATCH_SIZE": 8},
        replace=_NO_WEIGHTS,
        names={"tfds": MadeTfds((40, 40, 3), 4, [18, 10])},
        epochs=1,
    ),
    Program(
        name="ddim",
        floatx="float32",
        path=f"{_GENERATIVE}/ddim.py",
        constants={
            "dataset_repetitions": 1,
            "image_size": 32,
            "widths": [8, 12, 16],
            "block_depth": 1,
            "batch_size": 8,
        },
        # Keras no longer saves a model that was never called.
        replace=_NO_WEIGHTS | {"        checkpoint_callback,\n": ""},
        names={"tfds": MadeTfds((40, 44, 3), 5, [26, 10])},
        stop_before="model.load_weights(checkpoint_path)",
    ),
    Program(
        name="ddpm",
        floatx="float32",
        path=f"{_GENERATIVE}/ddpm.py",
        constants={
            "batch_size": 8,
            "img_size": 16,
            "first_conv_channels": 8,
            "num_res_blocks": 1,
            "total_timesteps": 10,
        },
        names={"tfds": MadeTfds((20, 24, 3), 5, [26])},
        stop_before="model.ema_network.load_weights",
    ),
    Program(
        name="cyclegan",
        floatx="float32",
        path=f"{_GENERATIVE}/cyclegan.py",
        constants={"orig_img_size": (36, 36), "input_img_size": (32, 32, 3), "batch_size": 2},
        # Keras no longer saves a model that was never called, nor pads by a tensor.
        replace={
            "ops.convert_to_tensor(padding_tensor)": "padding_tensor",
            "filters=64": "filters=8",
            "num_residual_blocks=9": "num_residual_blocks=2",
            "[plotter, model_checkpoint_callback]": "[plotter]",
        },
        names={"tfds": MadeTfds((40, 40, 3), 2, [9])},
        epochs=1,
        stop_before="weight_file = ",
    ),
    Program(
        name="dcgan_overriding_train_step",
        floatx="float32",
        path=f"{_GENERATIVE}/dcgan_overriding_train_step.py",
        replace={"batch_size=32": "batch_size=16", "alpha=0.2": "negative_slope=0.2"},
        instead={'os.makedirs("celeba_gan")': "", "ZipFile(": ""},
        files=_write_celebrities,
        epochs=1,
    ),
    Program(
        name="semisupervised_simclr",
        floatx="float32",
        path=f"{_TF_VISION}/semisupervised_simclr.py",
        constants={
            "unlabeled_dataset_size": 40,
            "labeled_dataset_size": 8,
            "image_size": 48,
            "batch_size": 12,
            "width": 16,
        },
        names={"tfds": MadeTfds((48, 48, 3), 10, [40, 8, 16])},
    ),
    Program(
        name="captcha_ocr",
        path=f"{_TF_VISION}/captcha_ocr.py",
        files=_write_captchas,
        stop_before="prediction_model = ",
    ),
    Program(
        name="image_captioning",
        floatx="float32",
        path=f"{_TF_VISION}/image_captioning.py",
        constants={
            "IMAGE_SIZE": (64, 64),
            "EMBED_DIM": 32,
            "FF_DIM": 32,
            "BATCH_SIZE": 6,
            "VOCAB_SIZE": 60,
        },
        replace=_NO_WEIGHTS,
        files=_write_captions,
        stop_before="def generate_caption",
    ),
    Program(
        name="image_classification_from_scratch",
        floatx="float32",
        path=f"{_VISION}/image_classification_from_scratch.py",
        constants={"image_size": (40, 40), "batch_size": 10},
        files=_write_pets,
        epochs=1,
        stop_before="img = keras.utils.load_img",
    ),
    Program(
        name="image_classification_from_scratch, tensorflow",
        floatx="float32",
        path=f"{_TF_VISION}/image_classification_from_scratch.py",
        constants={"image_size": (40, 40), "batch_size": 10},
        files=_write_pets,
        epochs=1,
        stop_before="img = keras.utils.load_img",
    ),
    Program(
        name="oxford_pets_image_segmentation",
        path=f"{_VISION}/oxford_pets_image_segmentation.py",
        constants={"img_size": (32, 32), "batch_size": 8, "val_samples": 12},
        files=_write_pet_masks,
        stop_before="def display_mask",
    ),
    Program(
        name="deeplabv3_plus",
        floatx="float32",
        path=f"{_VISION}/deeplabv3_plus.py",
        short_networks=False,  # the program looks for the sixth block
        constants={"IMAGE_SIZE": 64, "NUM_TRAIN_IMAGES": 8, "NUM_VAL_IMAGES": 4},
        replace=_NO_WEIGHTS,
        files=_write_people,
        epochs=1,
        needs=("scipy",),
        stop_before="colormap = loadmat",
    ),
    Program(
        name="mirnet",
        floatx="float32",
        path=f"{_TF_VISION}/mirnet.py",
        constants={"IMAGE_SIZE": 32, "MAX_TRAIN_IMAGES": 12},
        replace={"num_rrg=3, num_mrb=2, channels=64": "num_rrg=1, num_mrb=1, channels=8"},
        files=_write_low_light,
        stop_before="for low_light_image in random",
    ),
    Program(
        name="zero_dce",
        floatx="float32",
        path=f"{_TF_VISION}/zero_dce.py",
        constants={"IMAGE_SIZE": 32, "BATCH_SIZE": 4, "MAX_TRAIN_IMAGES": 12},
        files=_write_low_light,
        stop_before="for val_image_file in",
    ),
    Program(
        name="super_resolution_sub_pixel",
        path=f"{_VISION}/super_resolution_sub_pixel.py",
        constants={"crop_size": 30},
        replace=_NO_TMP,
        files=_write_segmentation_set,
        stop_before="total_bicubic_psnr = ",
    ),
    Program(
        name="siamese_network",
        path=f"{_TF_VISION}/siamese_network.py",
        constants={"target_shape": (32, 32)},
        replace=_NO_WEIGHTS | {".batch(32, ": ".batch(8, "},
        files=_write_triplets,
        epochs=1,
    ),
    Program(
        name="pointnet_segmentation",
        path=f"{_VISION}/pointnet_segmentation.py",
        constants={"NUM_SAMPLE_POINTS": 64, "BATCH_SIZE": 8},
        replace={"/tmp/.keras/datasets/": "", "[300]": "[20]"},
        files=_write_shapes,
        needs=("pandas",),
    ),
    Program(
        name="video_transformers",
        path=f"{_VISION}/video_transformers.py",
        constants={"NUM_FEATURES": 64},
        replace=_NO_TMP,
        instead={"feature_extractor = build_feature_extractor()": ""},
        files=_write_video_features,
        needs=("pandas",),
        stop_before="test_video = ",
    ),
)
