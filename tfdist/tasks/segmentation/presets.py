"""Published hyperparameters, as flags that the user's own flags override.

`camvid`: U-Net on CamVid, resized to 368x480, Adam at 5e-4 with weight decay 2e-4, median frequency
class weights: openvinotoolkit/nncf, examples/torch/semantic_segmentation/configs/unet_camvid.json.
(A U-Net of this size and width reached a mean IoU of 71.95 %: Open Model Zoo,
unet-camvid-onnx-0001.) The batch size of 10 and the 300 epochs, which that file does not specify,
are from davidtvs/PyTorch-ENet, args.py, which trains on CamVid with the same learning rate and
decay. Here the decay is decoupled from the gradient (AdamW), the learning rate follows a cosine
instead of dropping at plateaus, and the augmentation is tfdist's. Add `--data_dir`.

`camvid_small`: the same data at 128x160 in half an hour on two cores, found by trials;
`docs/data.md` says what they reached. Add `--data_dir`.

`oxford_pets`: a frozen MobileNetV2 with ImageNet weights under pix2pix's decoder, 128x128, Adam at
Keras's 1e-3 without a schedule, 20 epochs of batches of 64, mirroring as the only augmentation.
Source:
https://www.tensorflow.org/tutorials/images/segmentation.
"""

_CAMVID = (
    "--dataset=folder",
    "--num_classes=11",
    "--ignore_label=11",
    "--class_names=sky,building,pole,road,pavement,tree,sign,fence,car,pedestrian,bicyclist",
)

PRESETS: dict[str, tuple[str, ...]] = {
    "camvid": (
        *_CAMVID,
        "--image_size=368,480",
        "--class_weights=median_frequency",
        "--model=unet",
        "--base_filters=64",
        "--depth=4",
        "--optimizer=adamw",
        "--learning_rate=5e-4",
        "--weight_decay=2e-4",
        "--global_batch_size=10",
        "--epochs=300",
        "--loss=cross_entropy",
    ),
    "camvid_small": (
        *_CAMVID,
        "--image_size=128,160",
        "--stored_size=256,320",
        "--scale=0.6,2",
        "--color=0.4",
        "--class_weights=sqrt",
        "--logit_adjustment=0.75",
        "--model=unet",
        "--base_filters=16",
        "--depth=4",
        "--dropout=0.5",
        "--precision=auto",
        "--optimizer=adamw",
        "--learning_rate=3e-3",
        "--weight_decay=0.05",
        "--ema_momentum=0.99",
        "--global_batch_size=8",
        "--epochs=135",
        "--loss=cross_entropy_dice",
    ),
    "oxford_pets": (
        *("--dataset=tfds:oxford_iiit_pet", "--image_size=128,128", "--flip", "--scale=1,1"),
        *("--color=0", "--model=pix2pix_unet", "--base_filters=64", "--depth=5", "--pretrained"),
        *("--freeze_encoder", "--optimizer=adam", "--learning_rate=1e-3", "--schedule=constant"),
        *("--warmup_steps=0", "--clip_norm=0", "--global_batch_size=64", "--epochs=20"),
        "--loss=cross_entropy",
    ),
}
"""Name -> the flags that it stands for."""
