"""Queues that tests of the scheduler share: small traces in each format; where real ones are."""

from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[3] / "shared" / "sched"

PHILLY = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 07:00:41,64.0,2,128.0,6214e9
2017-10-10 07:00:41,3600,16,57600,11cb48
"""
MURI = """\
job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,\
resource_time_0,resource_time_1,resource_time_2,priority
0,4,0,1000,gpt2,4,433000,0,433,0.6,413,20,0
1,4,5000,2000,bert,4,380000,5000,190,0.5,163,18,1
2,8,6000,100,dqn,128,50900,1000,509,435,8,0.5,0
"""
SACCT = """\
JobID|Submit|Start|End|Elapsed|State|AllocTRES|ReqTRES|NCPUS|Account|User
100|2024-03-01T10:00:00|2024-03-01T10:05:00|2024-03-02T11:05:00|1-01:00:00|COMPLETED|\
billing=8,cpu=8,gres/gpu=2,gres/gpu:a100=2,mem=64G,node=1|cpu=8,gres/gpu=2|8|physics|ada
101|2024-03-01T09:59:30|2024-03-01T10:05:00|2024-03-01T10:06:30|01:30|FAILED|\
cpu=4,gres/gpu=1,node=1||4||bob
102|2024-03-01T11:00:00|Unknown|Unknown|00:00:00|CANCELLED by 7|||4|physics|ada
100|2024-03-03T10:00:00|2024-03-03T10:05:00|2024-03-03T10:05:10|00:00:10|NODE_FAIL|\
cpu=8,gres/gpu:a100=4|cpu=8|8|physics|ada
103|2024-03-03T10:00:00|2024-03-03T10:05:00|2024-03-03T10:05:10|00:00:10|COMPLETED|\
cpu=8,node=1|cpu=8|8|chemistry|eve
100.batch|2024-03-01T10:00:00|2024-03-01T10:05:00|2024-03-02T11:05:00|1-01:00:00|COMPLETED|\
cpu=8||8|physics|ada
"""
GAVEL = (
    "LM (batch size 5)\tpython main.py\tlanguage\t--steps\t1\t600\t1\t1\t-1.0\t10\n"
    "A3C\tpython main.py\trl\t--steps\t1\t1000\t2\t1\t-1.0\t0\n"
)
GAVEL_RATES = """{
 "v100": {"('LM (batch size 5)', 1)": {"null": 2.0, "('A3C', 1)": [1.5, 3.0]},
          "('A3C', 2)": {"null": 5.0}},
 "v100_unconsolidated": {"('A3C', 2)": {"null": 2.5}}
}"""
OWN = """\
# jobs of one afternoon
name,submitted_s,devices,profile,work,duration_s,device_types,shares

train,0,2,resnet,1000,,v100 p100,no
tune,60,1,,,300,,
"""
OWN_RATES = """\
profile,device_type,devices,rate,spread
resnet,v100,1,2.5,
resnet,v100,2,4.8,0.7
resnet,,1,1.0,
"""


def published(*parts):
    """Return the path of a published trace, or skip the test where there is none."""
    path = PUBLISHED.joinpath(*parts)
    if not path.exists():
        pytest.skip("no published traces here")
    return path
