// Shared by the four parts of the simulated CANN runtime. Signatures come from the CANN headers inside the torch_npu
// wheel: a function that does not match its public declaration does not compile.
#pragma once
#include <cstddef>
#include <cstdint>


#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "third_party/hccl/inc/hccl/hccl.h"

#define SIM_API extern "C" __attribute__((visibility("default")))

namespace sim {

// Settings, read once from the environment of the process.
struct Settings {
    int device_count;      // NPU_SIM_DEVICES
    size_t memory_bytes;   // NPU_SIM_MEMORY_GIB, per device and process
    double timeout_s;      // NPU_SIM_TIMEOUT_S, how long a collective waits for its peers
    bool trace;            // NPU_SIM_TRACE
    const char* run_dir;   // NPU_SIM_RUN_DIR, where communicators rendezvous
    const char* soc_name;  // NPU_SIM_SOC
};
const Settings& settings();

// Prints "[npu-sim] ..." on stderr and ends the process: something was asked that the simulator does not do, and any
// made-up answer would be a silent error.
[[noreturn]] void unhandled(const char* what);

void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

int current_device();  // -1 before the first aclrtSetDevice of this thread
bool capturing();      // a graph is captured

size_t acl_element_size(aclDataType type);  // 0 for types that are not simulated
double load_element(const void* base, size_t index, aclDataType type);
void store_element(void* base, size_t index, aclDataType type, double value);

}  // namespace sim
