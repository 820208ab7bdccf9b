"""Flags of other tools, and the flags of tfdist that do the same."""

from collections.abc import Iterable

# Words of Keras, Accelerate, Lightning, Ultralytics, nnU-Net and others, without dashes. Each flag
# of tfdist is followed by the words for it.
_WORDS = {
    "base_filters": "width channels filters features start_filters",
    "cache": "cache_dataset",
    "check": "sanity_check",
    "checkpoint_every": "save_every save_steps save_period save_freq checkpoint_freq "
    "every_n_train_steps checkpointing_steps",
    "class_names": "names labels",
    "clip_norm": "clipnorm clip clip_grad grad_clip max_grad_norm gradient_clip gradient_clip_val "
    "gradient_clipping",
    "color": "hsv_h hsv_s hsv_v color_jitter brightness",
    "data_dir": "data data_path data_root dataset_dir datasets_dir data_folder train_dir train "
    "train_data root input",
    "dataset": "dataset_name ds",
    "deterministic": "reproducible cudnn_deterministic",
    "devices": "gpu gpu_ids device device_ids accelerator cuda",
    "dry_run": "fast_dev_run",
    "early_stopping": "patience early_stop",
    "ema_momentum": "ema ema_decay model_ema",
    "epochs": "epoch num_epochs n_epochs nepochs max_epochs num_train_epochs ep",
    "flip": "fliplr flipud hflip horizontal_flip",
    "freeze_encoder": "freeze freeze_backbone freeze_base",
    "global_batch_size": "batch_size batch batchsize bs train_batch_size total_batch_size "
    "per_device_train_batch_size per_gpu_batch_size mini_batch_size b",
    "ignore_label": "ignore_index",
    "image_size": "imgsz img_size imagesize size resolution input_size input_shape crop_size "
    "patch_size",
    "init_from": "weights load load_from load_weights checkpoint ckpt ckpt_path pretrained_weights "
    "finetune fine_tune from_pretrained pretrained_model_name_or_path",
    "jit_compile": "compile xla torch_compile use_xla",
    "keep_checkpoints": "max_to_keep save_total_limit save_top_k checkpoints_total_limit",
    "learning_rate": "lr lr0 base_lr init_lr initial_lr initial_learning_rate eta step_size",
    "log_every": "logging_steps log_interval print_freq print_every log_freq log_every_n_steps "
    "log_steps",
    "loss": "criterion loss_fn loss_function objective",
    "max_steps": "steps num_steps n_steps train_steps max_iter max_iters iterations iters "
    "total_steps max_train_steps num_train_steps",
    "micro_batches": "gradient_accumulation_steps accumulate_grad_batches accumulate grad_accum "
    "accum_steps gradient_accumulation accum_iter",
    "model": "arch architecture backbone network net model_name model_type encoder",
    "num_classes": "nc n_classes classes nclasses num_labels",
    "optimizer": "optim opt",
    "precision": "mixed_precision amp fp16 bf16 half dtype float16 bfloat16 use_amp",
    "preset": "recipe config_name configuration",
    "profile": "profiler profile_batch",
    "quiet": "silent verbose verbosity",
    "rematerialize": "gradient_checkpointing activation_checkpointing checkpoint_activations remat",
    "replicas_per_worker": "nproc_per_node num_processes_per_node",
    "run_dir": "output output_dir out out_dir outdir output_path save_dir save_path save logdir "
    "log_dir project name exp_name experiment model_dir workdir work_dir default_root_dir "
    "results_dir checkpoint_dir ckpt_dir job_dir",
    "scale": "zoom_range random_scale",
    "schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule sched cos_lr",
    "seed": "random_seed manual_seed seed_everything rng_seed",
    "shard_optimizer": "zero zero_stage fsdp deepspeed sharded_ddp",
    "steps_per_loop": "steps_per_execution iterations_per_loop",
    "strategy": "distribution_strategy distributed_backend distributed_type parallel ddp",
    "track": "report_to logger wandb mlflow with_tracking log_with",
    "train_examples": "max_train_samples limit_train_batches num_train",
    "val_examples": "max_eval_samples limit_val_batches num_val",
    "val_fraction": "val_split validation_split val_ratio val_size test_size",
    "virtual_devices": "num_virtual_devices fake_devices",
    "warmup_steps": "warmup warmup_epochs num_warmup_steps lr_warmup_steps",
    "weight_decay": "wd l2",
    # of the other commands
    "images": "source input_dir image input",
    "masks": "mask labels_dir",
    "format": "export_format",
    "port": "http_port",
    "workers": "num_machines nnodes num_nodes num_workers nodes world_size",
    "hosts": "hostfile machines",
    "max_restarts": "restarts",
}

# What no flag does.
_ADVICE = {
    "resume": "The same command with the same --run_dir continues a run.",
    "fold": "A run trains on one split. Give each fold a --data_dir and a --run_dir.",
    "workers": "Start several processes with python -m tfdist.launch --workers=N -- FLAGS. Data "
    "are read in as many threads as there are cores.",
    "rank": "python -m tfdist.launch tells each process its place.",
    "gpus": "--strategy=mirrored uses all of them; --devices=GPU:0,GPU:1 names some.",
    "steps": "An epoch is a pass over the data. Use --max_steps or --train_examples.",
}
_ADVICE_WORDS = {
    "resume": "resume resume_from resume_from_checkpoint auto_resume continue c continue_training "
    "restart_from exist_ok",
    "fold": "fold folds kfold",
    "workers": "num_workers nworkers dataloader_num_workers world_size nnodes num_nodes nodes "
    "num_machines workers num_processes nprocs n_procs",
    "rank": "rank local_rank node_rank machine_rank task_index",
    "gpus": "gpus num_gpus ngpus n_gpus num_devices",
    "steps": "steps_per_epoch num_steps_per_epoch steps_per_epochs",
}


def find_meaning(name: str, valid: Iterable[str]) -> str | None:
    """Returns a sentence on which flag does what a flag of another tool does; None if unknown.

    >>> find_meaning("lr", ["learning_rate", "loss"])
    'Use --learning_rate.'
    >>> find_meaning("batch-size", ["global_batch_size"])
    'Use --global_batch_size.'
    >>> find_meaning("resume", ["run_dir"])
    'The same command with the same --run_dir continues a run.'
    """
    word = name.strip("-").replace("-", "_").lower()
    known = set(valid)
    if word in known:
        return f"Use --{word}."
    found = [flag for flag, words in _WORDS.items() if flag in known and word in words.split()]
    if found:
        return f"Use {' or '.join(f'--{flag}' for flag in found)}."
    for key, words in _ADVICE_WORDS.items():
        if word in words.split() and "run_dir" in known:
            return _ADVICE[key]
    return None
