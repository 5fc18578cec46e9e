#pragma once

/// Includes the whole public API of pinflow except pinflow/cuda.hpp, which needs CUDA's headers.

// core: no device, no format
#include "pinflow/array.hpp"
#include "pinflow/dtype.hpp"
#include "pinflow/empty_on_move.hpp"
#include "pinflow/error.hpp"
#include "pinflow/fault_guard.hpp"
#include "pinflow/file.hpp"
#include "pinflow/mapped_file.hpp"
#include "pinflow/memory.hpp"
#include "pinflow/row_source.hpp"
#include "pinflow/version.hpp"
// devices
#include "pinflow/buffer.hpp"
#include "pinflow/device.hpp"
#include "pinflow/pin.hpp"
#include "pinflow/stream.hpp"
// rows by index
#include "pinflow/rows.hpp"
// formats
#include "pinflow/formats/hdf5.hpp"
#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/open.hpp"
#include "pinflow/formats/safetensors.hpp"
// loader
#include "pinflow/loader/batch.hpp"
#include "pinflow/loader/digest.hpp"
#include "pinflow/loader/loader.hpp"
#include "pinflow/loader/report.hpp"
#include "pinflow/loader/route.hpp"
#include "pinflow/loader/sampler.hpp"
#include "pinflow/loader/shard.hpp"
#include "pinflow/loader/state.hpp"
// tensors of other libraries
#include "pinflow/dlpack.hpp"
// whole models
#include "pinflow/load.hpp"
// training
#include "pinflow/train/embedding_table.hpp"
#include "pinflow/train/flat_parameters.hpp"
#include "pinflow/train/optimizer.hpp"
// segments in shared memory
#include "pinflow/shared/segment.hpp"
