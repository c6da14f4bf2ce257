import sys, random; sys.path.insert(0,'tests')
import test_resample_rules as t
for seed in range(7,27):
    t.Random=lambda m, s=seed: random.Random(f"{m}{s}")
    for m in ("nearest", "nearest-exact", "linear", "bicubic"):
        try: t.test_positions_on_a_gpu_are_its_own(m); print(seed,m,'ok',end=' ')
        except AssertionError as e: print(seed,m,'FAIL',str(e)[:300])
