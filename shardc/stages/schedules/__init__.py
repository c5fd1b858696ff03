"""Built-in schedules by the names that plans use, and `register` for one's own."""

from shardc.stages.schedules.auto import auto
from shardc.stages.schedules.breadth_first import breadth_first
from shardc.stages.schedules.dualpipe_v import dualpipe_v
from shardc.stages.schedules.gpipe import gpipe
from shardc.stages.schedules.greedy import greedy
from shardc.stages.schedules.interleaved import interleaved
from shardc.stages.schedules.one_f_one_b import one_f_one_b
from shardc.stages.schedules.registry import Schedule, default_virtual, names, order, register
from shardc.stages.schedules.zb_h1 import zb_h1
from shardc.stages.schedules.zb_v import zb_v

__all__ = ["Schedule", "default_virtual", "names", "order", "register"]

register("gpipe", gpipe)
register("1f1b", one_f_one_b)
register("interleaved", interleaved, virtual=2)
register("bfs", breadth_first, virtual=2)
register("zb-h1", zb_h1)
register("zb-v", zb_v, virtual=2)
register("dualpipe-v", dualpipe_v, virtual=2)
register("greedy", greedy)
register("auto", auto)
