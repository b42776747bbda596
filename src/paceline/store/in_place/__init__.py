"""Opens data sets as they are: LMDB databases, tar shards, TFRecord files and folders of files.

Such data are a pack whose shards are the user's own files. Only an index is made of them, once, in
the format of a pack's index, and is kept in a file beside them (`side_file`): what reads packs
reads them (`paceline.native.PackReader`), and so all that builds on it does, the loader too.

    find      what a path names
    lmdb, archives, tfrecord, files    where the samples of each kind of data lie
    side_file makes the index, and makes it again when the data were changed
    opening   open_pack
    checksums reads all data once, so that they can be verified from then on
    packing   find_source: databases and TFRecord files as sources of a pack
"""
