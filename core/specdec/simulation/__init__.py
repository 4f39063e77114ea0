"""Simulation: the scheduler and width policies over declared costs and acceptance, on a clock nobody waits for. Torch-free.

acceptance.py  what would be accepted: curves, bursts, changes, copies; luck keyed by request and position
costs.py       what rounds and prompt chunks cost
history.py     copies of declared quality, in place of decoded history
device.py      slots, pages and rounds of a simulated model, for the scheduler
workload.py    when which request comes: Poisson or recorded
profiles.py    named sets of costs and curves, each number with its source; profiles.json holds those of no recipe
policies.py    width policies by name
fleet.py       replicas, dispatch, and what became of every request
summary.py     throughput, latency tails, widths
plot.py        the summary as SVG
"""
