"""What one rank of `test_train_datasets.py` does: `python datasets_worker.py OPTIONS FOLDER` runs the example."""

import json
import os
import sys
from pathlib import Path

import torch

from examples import train_datasets

torch.set_num_threads(1)
losses = train_datasets.main(train_datasets.options(sys.argv[1].split()))
(Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps({"losses": losses}))
os._exit(0)
