"""A second reader of packs, written from docs/reference/pack-format.md alone.

It is slow and checks everything: what it accepts is a pack as the page says.
"""

import ctypes
import hashlib
import struct

import numpy as np

from paceline.native import crc32c

TYPES = {
    1: "<u8", 2: "<u8", 3: "<u4", 4: "<u4", 5: "<i4", 6: "<u4", 7: "<i8", 8: "<u8", 10: "<u8",
    12: "<u8", 14: "<u8", 15: "<u8", 16: "u1", 17: "<u8", 18: "<u8", 19: "<u8", 20: "<u8",
    22: "<u8",
}  # fmt: skip
NARROW = {1, 2, 3, 5, 6, 7, 15, 16}
OPTIONAL = {18, 19, 20, 21, 22, 23, 26}


class ParsedPack:
    """Everything that a pack's files say, checked against each other."""

    def __init__(self, folder, many_samples=65536):
        self.folder = folder
        self.many_samples = many_samples
        data = (folder / "index.pace").read_bytes()
        fields = struct.unpack_from("<8sIIQQQIIQII", data)
        magic, version, section_count, index_bytes, samples, folders = fields[:6]
        shards, classes, reserved, table_checksum, header_checksum = fields[6:]
        assert (magic, reserved) == (b"PACEPACK", 0)
        assert version in (2, 3)
        assert index_bytes == len(data)
        assert crc32c(data[:60]) == header_checksum
        table = data[64 : 64 + 32 * section_count]
        assert crc32c(table) == table_checksum
        self.identity = hashlib.sha256(data[:64] + table).hexdigest()[:32]
        self.sections, self.widths, contents = {}, {}, {}
        covered = []
        for k in range(section_count):
            number, flags, offset, length, checksum, width = struct.unpack_from(
                "<IIQQII", table, 32 * k
            )
            assert (offset % 64, number in contents) == (0, False)
            assert flags == (0 if number in OPTIONAL else 1)
            assert width == 0 or (version == 3 and number in NARROW)
            content = data[offset : offset + length]
            assert (len(content), crc32c(content)) == (length, checksum)
            contents[number], self.widths[number] = content, width
            covered.append((offset, offset + length))
        self.extent_count = len(contents[4]) // 4
        for number, content in contents.items():
            count = self.extent_count if number in (1, 2, 3, 15, 16) else samples
            self.sections[number] = self.values(number, content, self.widths[number], count)
        assert (26 in contents) == (version == 3)
        if version == 3:
            sums = b"".join(
                struct.pack("<I", crc32c(content[at : at + 65536]))
                for number, content in contents.items()
                if number != 26
                for at in range(0, len(content), 65536)
            )
            assert contents[26] == sums
        end = 64 + 32 * section_count
        for begin, finish in [*sorted(covered), (len(data), len(data))]:
            assert 0 <= begin - end < 64
            assert not any(data[end:begin])
            end = finish
        self.names = self.strings(8, 9, samples)
        self.folders = self.strings(10, 11, folders)
        self.classes = self.strings(12, 13, classes)
        assert self.names == sorted(set(self.names))
        assert self.folders == sorted(set(self.folders), key=lambda name: name + b"/")
        assert len(self.sections[14]) == shards
        assert all(len(self.sections[k]) == samples for k in (5, 6, 7))
        assert set(self.sections[5].tolist()) <= set(range(-1, classes))
        self.check_widths(shards, classes)
        self.check_extents(version)
        self.check_folders()
        self.check_table()
        self.check_shards()
        self.check_parity()

    @staticmethod
    def values(number, content, width, count):
        if number not in TYPES:
            return content
        full = np.dtype(TYPES[number])
        if width == 0:
            return np.frombuffer(content, full)
        stored = np.frombuffer(content, f"<{full.kind}{width}")
        assert len(stored) in (1, count)
        return np.full(count, stored[0], full) if len(stored) == 1 else stored.astype(full)

    def check_widths(self, shards, classes):
        """Check that each column is as narrow as it may be, and no narrower."""
        for number in sorted(NARROW & set(self.sections)):
            column, full = self.sections[number], np.dtype(TYPES[number])
            bounds = {
                1: (0, int(max(self.sections[14], default=0))),
                3: (0, max(shards - 1, 0)),
                5: (-1, classes - 1),
            }
            low, high = bounds.get(
                number, (int(column.min()), int(column.max())) if len(column) else (1, 0)
            )
            kinds = (np.iinfo(f"{full.kind}{width}") for width in (1, 2, 4, 8))
            fitting = next(k for k in kinds if k.min <= low and high <= k.max).bits // 8
            if 26 not in self.sections or not len(column):
                expected = 0
            else:
                expected = 0 if fitting == full.itemsize and low != high else fitting
            assert self.widths[number] == expected, number

    def strings(self, offsets, blob, count):
        bounds = self.sections[offsets].tolist()
        assert len(bounds) == count + 1
        assert bounds[0] == 0
        assert bounds[-1] == len(self.sections[blob])
        return [self.sections[blob][bounds[k] : bounds[k + 1]] for k in range(count)]

    def check_extents(self, version):
        count = len(self.sections[1])
        assert all(len(self.sections[k]) == count for k in (2, 3, 4))
        assert (15 in self.sections) == (16 in self.sections)
        if 16 in self.sections:
            assert self.sections[16].any()
            assert len(self.sections[15]) == len(self.sections[16]) == count
        if 17 in self.sections:
            first = self.sections[17]
            assert (first[0], first[-1], len(first)) == (0, count, len(self.names) + 1)
            assert (np.diff(first) >= 1).all()
            assert (np.diff(first) > 1).any()
        else:
            assert count == len(self.names)
        stored = self.sections.get(15, self.sections[2])
        for k in range(count):
            is_small = version == 3 and stored[k] < 64
            assert int(self.sections[1][k]) % (8 if is_small else 64) == 0
            self.extent(k)
        codecs = self.sections[16].tolist() if 16 in self.sections else []
        needs_3 = (
            len(self.names) > self.many_samples
            or any(int(offset) % 64 for offset in self.sections[1])
            or max(codecs, default=0) > 1
        )
        assert (27 in self.sections) == any(code & 15 == 3 for code in codecs)
        assert version == (3 if needs_3 else 2)

    def extent(self, k):
        offset, length, shard = (int(self.sections[n][k]) for n in (1, 2, 3))
        stored = int(self.sections[15][k]) if 15 in self.sections else length
        codec = int(self.sections[16][k]) if 16 in self.sections else 0
        data = self.shard(shard)[offset : offset + stored]
        assert len(data) == stored
        if codec:
            data = self.decoded(data, length, codec)
        assert len(data) == length
        assert crc32c(data) == self.sections[4][k]
        return data

    def decoded(self, data, length, code):
        kind, width = code & 15, 1 << (code >> 4)
        assert kind in (1, 2, 3)
        assert width in (1, 2, 4, 8)
        assert length <= 64 << 20
        if kind == 2:
            data = lz4_decode(data, length)
        else:
            magic = b"\x28\xb5\x2f\xfd" if kind == 3 else b""
            data = zstd_decode(magic + data, length, self.sections[27] if kind == 3 else b"")
        whole = length // width * width
        planes = np.frombuffer(data[:whole], np.uint8).reshape(width, -1)
        return planes.T.tobytes() + data[whole:]

    def extents(self, sample):
        if 17 not in self.sections:
            return [sample]
        return list(range(*self.sections[17][sample : sample + 2].tolist()))

    def read(self, sample):
        return b"".join(self.extent(k) for k in self.extents(sample))

    def check_folders(self):
        samples, ends = self.sections[19].reshape(-1, 2).tolist(), self.sections[20].tolist()
        assert len(samples) == len(ends) == len(self.folders)
        for k, folder in enumerate(self.folders):
            below = [n for n, name in enumerate(self.names) if name.startswith(folder + b"/")]
            assert samples[k][1] - samples[k][0] == len(below)
            assert not below or below == list(range(*samples[k]))
            inside = [name for name in self.folders if name.startswith(folder + b"/")]
            assert self.folders[k + 1 : ends[k]] == inside
            assert folder not in self.names

    def check_table(self):
        table, count = self.sections[18].tolist(), len(self.names)
        homes = 2
        while homes < 2 * count:
            homes *= 2
        assert len(table) >= homes + 64
        entries = sorted((name_hash(name), k) for k, name in enumerate(self.names))
        expected = [0] * len(table)
        slot = -1
        for value, k in entries:
            slot = max(slot + 1, value >> (64 - homes.bit_length() + 1))
            expected[slot] = (value & 0xFFFFFF) << 40 | (k + 1)
        assert table == expected

    def shard(self, number):
        return (self.folder / f"shard-{number:05d}.pace").read_bytes()

    def check_shards(self):
        digests = self.sections[21]
        for k, length in enumerate(self.sections[14].tolist()):
            data = self.shard(k)
            assert len(data) == length
            assert struct.unpack_from("<8sI", data)[0] == b"PACESHRD"
            assert struct.unpack_from("<I", data, 12)[0] == k
            assert not any(data[16:60])
            assert struct.unpack_from("<I", data, 60)[0] == crc32c(data[:60])
            assert hashlib.sha256(data).digest() == digests[32 * k : 32 * k + 32]

    def check_parity(self):
        assert (22 in self.sections) == (23 in self.sections)
        if 22 not in self.sections:
            return
        group, *lengths = self.sections[22].tolist()
        shards = [self.shard(k) for k in range(len(self.sections[14]))]
        assert len(lengths) == -(-len(shards) // group)
        for k, length in enumerate(lengths):
            data = (self.folder / f"parity-{k:05d}.pace").read_bytes()
            assert len(data) == length
            assert data[:16] == struct.pack("<8sII", b"PACEPRTY", 2, k)
            assert hashlib.sha256(data).digest() == self.sections[23][32 * k : 32 * k + 32]
            members = shards[k * group : (k + 1) * group]
            total = np.zeros(max(len(shard) for shard in members), np.uint8)
            for shard in members:
                total[: len(shard)] ^= np.frombuffer(shard, np.uint8)
            assert data[64:] == total.tobytes()


def name_hash(name):
    mask = (1 << 64) - 1
    value = 0xCBF29CE484222325
    for byte in name:
        value = (value ^ byte) * 0x100000001B3 & mask
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & mask
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & mask
    return value ^ value >> 33


def zstd_decode(data, length, dictionary):
    library = ctypes.CDLL("libzstd.so.1")
    for name in ("ZSTD_createDCtx", "ZSTD_decompress_usingDict"):
        getattr(library, name).restype = ctypes.c_size_t
    context = ctypes.c_void_p(library.ZSTD_createDCtx())
    buffer = ctypes.create_string_buffer(length)
    found = library.ZSTD_decompress_usingDict(
        context,
        buffer,
        ctypes.c_size_t(length),
        data,
        ctypes.c_size_t(len(data)),
        dictionary,
        ctypes.c_size_t(len(dictionary)),
    )
    library.ZSTD_freeDCtx(context)
    assert found == length
    return buffer.raw


def lz4_decode(data, length):
    buffer = ctypes.create_string_buffer(length)
    found = ctypes.CDLL("liblz4.so.1").LZ4_decompress_safe(data, buffer, len(data), length)
    assert found == length
    return buffer.raw
