"""A recipe that says something else than the default with every word."""

import dataclasses

from firecaffe import ParallelConfig
from tests.kit.training import recipe_with

APART = [
    *(f"parallel.{word.name}" for word in dataclasses.fields(ParallelConfig)),
    *("prune.threshold", "share.bits", "share.start", "share.train", "share.gradient"),
]
"""What cannot be had with other words of OTHER; see test_ranks.py, test_identity.py."""

OTHER = recipe_with("""
model.name=lenet model.args={'num_classes':3,'a':{'b':[1]}} model.weights=w.pt model.freeze=['c.*']
model.low_rank={'ip1':9} data.name=own_sets:photos
data.args={'root':'photos','sizes':[1,2],'more':{'a':0.5}} data.resize=128 data.decode_threads=3
data.cache=/fast/disk data.cache_bytes=1000000000 data.balance=classes data.on_error=skip
data.exif=apply data.hold_out=0.1 data.augment=none data.crop=24 data.pad=4 data.mirror=True
data.mixup=0.2 data.cutmix=1.0 data.erasing=0.25 data.mean=[0.1,0.3333333333333333,1e-30]
data.std=[2.0] train.global_batch_size=96 train.micro_batch_size=8 train.steps=70 train.seed=9
train.device=cpu train.threads=2 train.autocast=bfloat16 train.channels_last=True
train.compile=True train.deterministic=False train.eval_every=7 train.stop_after=3
train.ema_decay=0.99 train.ema_warmup=True train.batch_norm_samples=512 train.eval_batch_size=33
solver.type=nesterov solver.args={'rho':0.9} solver.base_lr=1e-05 solver.scale=sqrt
solver.reference_batch_size=32 solver.lr_policy=multistep solver.gamma=0.1 solver.power=0.5
solver.stepsize=11 solver.stepvalue=[10,20] solver.pct_start=0.25 solver.div_factor=10.0
solver.final_div_factor=500.0 solver.base_momentum=0.8 solver.warmup_steps=5 solver.momentum=0.85
solver.momentum2=0.99 solver.momentum_form=caffe solver.momentum_correction=True solver.trust=0.02
solver.rms_decay=0.9 solver.delta=1e-06 solver.weight_decay=0.0005 solver.decay_form=decoupled
solver.lr_mult={'*.bias':2.0} solver.decay_mult={'@vector':0.0,'a.b"c':0.5}
solver.clip_gradients=35.0 exchange.algorithm=halving_doubling exchange.compressor=int8
exchange.compressor_level=1 exchange.bucket_bytes=1000000 exchange.shared_memory=False
exchange.timeout_s=0.5 exchange.silent_s=0.6 checkpoint.every=12 checkpoint.every_s=3.5
checkpoint.keep_last=7 checkpoint.best=True run.folder=runs/mine run.tensorboard=False
run.loggers=['mlflow'] run.digests=True run.cluster=mine.toml run.tuned=hand task.name=segmentation
task.args={'ignore_index':255,'num_classes':2} task.label_smoothing=0.1
task.class_weights=[1.0,2.5] task.metrics=['f1','mean_iou'] task.metric=mean_iou
synchrony.shares_every=3 synchrony.in_flight=2 synchrony.server=sharded synchrony.lock=none
synchrony.learners=5 synchrony.backup_workers=2 synchrony.dropped=again synchrony.max_staleness=3
synchrony.gradients_per_update=2 synchrony.staleness_rate=inverse synchrony.compensate=gap
synchrony.server_momentum=delayed_nesterov synchrony.warm_steps=7 synchrony.clock=simulated
synchrony.speeds=measured synchrony.speeds_from=rank-0.jsonl synchrony.spread=0.5
synchrony.slow_factor=3.0 synchrony.replicas=2 synchrony.local_steps=5
synchrony.growth_coefficient=0.02 synchrony.warm_epochs=2 synchrony.warm_until_drop=True
synchrony.outer=nesterov synchrony.outer_lr=0.6 synchrony.outer_momentum=0.8
synchrony.inner_momentum=zero synchrony.overlap_steps=1 synchrony.fragments=3
prune.keep={'fc*':0.1} prune.how=surgery prune.steps=50 prune.every=5 prune.scope=all
""").replace("data.path", "/some where/ü \"quoted\" 'data', no UTF-8: \udce9")
"""Every word has another value than its default."""
