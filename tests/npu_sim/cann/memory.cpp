// Device memory is host memory with a budget per process: mmap without reserve, so large pools cost nothing until used.
#include "sim.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr aclError kOutOfMemory = 207001;  // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr aclError kBadArgument = 107000;  // ACL_ERROR_RT_PARAM_INVALID

std::mutex lock;
size_t used = 0;
std::map<void*, size_t> blocks;    // aclrtMalloc
std::map<void*, size_t> reserved;  // aclrtReserveMemAddress
std::map<void*, size_t> mapped;    // aclrtMapMem

struct Physical {
    int file;
    size_t bytes;
};

aclError allocate(void** result, size_t bytes) {
    if (bytes == 0) bytes = 512;
    std::lock_guard<std::mutex> guard(lock);
    *result = nullptr;
    if (used + bytes > sim::settings().memory_bytes) return kOutOfMemory;
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return kOutOfMemory;
    blocks[address] = bytes;
    used += bytes;
    *result = address;
    sim::trace("malloc %zu -> %p", bytes, address);
    return ACL_SUCCESS;
}

}  // namespace

SIM_API aclError aclrtMalloc(void** result, size_t bytes, aclrtMemMallocPolicy) { return allocate(result, bytes); }
SIM_API aclError aclrtMallocAlign32(void** result, size_t bytes, aclrtMemMallocPolicy) { return allocate(result, bytes); }
SIM_API aclError aclrtMallocWithCfg(void** result, size_t bytes, aclrtMemMallocPolicy, aclrtMallocConfig*) {
    return allocate(result, bytes);
}
SIM_API aclError aclrtFree(void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto block = blocks.find(address);
    if (block == blocks.end()) return kBadArgument;
    munmap(address, block->second);
    used -= block->second;
    blocks.erase(block);
    sim::trace("free %p", address);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard<std::mutex> guard(lock);
    *total_bytes = sim::settings().memory_bytes;
    *free_bytes = *total_bytes - used;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtGetMemUsageInfo(int32_t, aclrtMemUsageInfo*, size_t, size_t* count) {
    *count = 0;
    return ACL_SUCCESS;
}

// ---- host memory
SIM_API aclError aclrtMallocHost(void** result, size_t bytes) {
    return posix_memalign(result, 4096, bytes ? bytes : 64) ? kOutOfMemory : ACL_SUCCESS;
}
SIM_API aclError aclrtMallocHostWithCfg(void** result, uint64_t bytes, aclrtMallocConfig*) { return aclrtMallocHost(result, bytes); }
SIM_API aclError aclrtFreeHost(void* address) {
    free(address);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtHostRegister(void* address, uint64_t, aclrtHostRegisterType, void** device_address) {
    if (device_address) *device_address = address;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtHostRegisterV2(void*, uint64_t, uint32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

// ---- copies
SIM_API aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
    if (bytes > room) return kBadArgument;
    memmove(to, from, bytes);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
    return aclrtMemcpy(to, room, from, bytes, kind);
}
SIM_API aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                               aclrtStream) {
    return aclrtMemcpy(to, room, from, bytes, kind);
}
SIM_API aclError aclrtMemset(void* address, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return kBadArgument;
    memset(address, value, bytes);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, aclrtStream) {
    return aclrtMemset(address, room, value, bytes);
}

// ---- virtual memory (expandable segments): physical pages are memfds mapped into reserved ranges
SIM_API aclError aclrtReserveMemAddress(void** result, size_t bytes, size_t, void* wanted, uint64_t) {
    void* address = mmap(wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return kOutOfMemory;
    std::lock_guard<std::mutex> guard(lock);
    reserved[address] = bytes;
    *result = address;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtReleaseMemAddress(void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto range = reserved.find(address);
    if (range == reserved.end()) return kBadArgument;
    munmap(address, range->second);
    reserved.erase(range);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp*, uint64_t) {
    std::lock_guard<std::mutex> guard(lock);
    if (used + bytes > sim::settings().memory_bytes) return kOutOfMemory;
    int file = memfd_create("npu-sim", MFD_CLOEXEC);
    if (file < 0) return kOutOfMemory;
    if (ftruncate(file, bytes)) {
        close(file);
        return kOutOfMemory;
    }
    used += bytes;
    *handle = new Physical{file, bytes};
    return ACL_SUCCESS;
}
SIM_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    Physical* physical = static_cast<Physical*>(handle);
    std::lock_guard<std::mutex> guard(lock);
    used -= physical->bytes;
    close(physical->file);
    delete physical;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
    Physical* physical = static_cast<Physical*>(handle);
    void* at = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, offset);
    if (at == MAP_FAILED) return kBadArgument;
    std::lock_guard<std::mutex> guard(lock);
    mapped[address] = bytes;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtUnmapMem(void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto range = mapped.find(address);
    if (range == mapped.end()) return kBadArgument;
    // The range stays reserved, but touching it is an error again, as on a device.
    void* at = mmap(address, range->second, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mapped.erase(range);
    return at == MAP_FAILED ? kBadArgument : ACL_SUCCESS;
}
SIM_API aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* bytes) {
    *bytes = 2 << 20;
    return ACL_SUCCESS;
}
