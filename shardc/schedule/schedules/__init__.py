"""Built-in schedules by the names that plans use, and `register` for one's own."""

from shardc.schedule.schedules.auto import auto
from shardc.schedule.schedules.breadth_first import breadth_first
from shardc.schedule.schedules.dualpipe_v import dualpipe_v
from shardc.schedule.schedules.gpipe import gpipe
from shardc.schedule.schedules.greedy import greedy
from shardc.schedule.schedules.interleaved import interleaved
from shardc.schedule.schedules.one_f_one_b import one_f_one_b
from shardc.schedule.schedules.registry import ScheduleFunction as Schedule
from shardc.schedule.schedules.registry import default_virtual, names, order, register
from shardc.schedule.schedules.zb_h1 import zb_h1
from shardc.schedule.schedules.zb_v import zb_v

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
