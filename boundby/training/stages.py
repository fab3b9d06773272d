"""The names of the stages that every integration uses, so that one verdict reads them all. Loops may add their own."""

DATA = "data"  # the wait for the next batch, with what the framework does to fetch it
H2D = "h2d"  # the copy of a batch to the device
FORWARD = "forward"  # the model and its loss
BACKWARD = "backward"
CLIP = "clip"  # of the gradients, where it is not part of the optimizer's step
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"  # of the learning rate
ZERO_GRAD = "zero_grad"
CALLBACKS = "callbacks"  # of the framework and its user
LOGGING = "logging"
CHECKPOINT = "checkpoint"
# Of reinforcement learning from feedback; forward, backward and optimizer may lie inside the update.
ROLLOUT = "rollout"  # the policy generates answers
REWARD = "reward"  # they are scored
REFERENCE = "reference"  # what the model that the policy began from says of them
UPDATE = "update"
# What interrupts a loop, found without marks.
GARBAGE_COLLECTION = "garbage_collection"
COMPILE = "compile"
EVALUATION = "evaluation"  # excluded from the step in which it happens
EPOCH = "epoch"  # a span: it holds steps
