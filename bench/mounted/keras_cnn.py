"""Keras' own example of image classification from a folder, on JPEG images by class."""

import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras

keras.utils.set_random_seed(0)
images = keras.utils.image_dataset_from_directory(
    sys.argv[1], image_size=(64, 64), batch_size=32, shuffle=True, seed=1, verbose=False
)
layers = keras.layers
model = keras.Sequential(
    [
        layers.Rescaling(1 / 255),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Conv2D(64, 3, strides=2, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ]
)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
seconds, cpu_s = [], []
for epoch in range(int(sys.argv[2]) + 1):
    begin, begin_cpu = time.perf_counter(), time.process_time()
    loss = model.fit(images, epochs=1, verbose=0).history["loss"][-1]
    if epoch:
        seconds.append(time.perf_counter() - begin)
        cpu_s.append(time.process_time() - begin_cpu)
result = {"seconds": seconds, "cpu_s": cpu_s, "samples": len(images.file_paths), "loss": loss}
sys.stdout.write(json.dumps(result) + "\n")
