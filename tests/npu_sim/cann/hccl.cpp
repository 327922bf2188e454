// HCCL between processes of one machine. Ranks meet in a small shared file; payloads are read straight out of the peer's
// memory (process_vm_readv), so sizes, types and the kind of call are compared before a byte moves: a mismatch that would
// hang or corrupt on a device is an error here, and a rank that never comes is named after the deadline.
#include "sim.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <functional>
#include <map>
#include <mutex>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr uint32_t kMaxRanks = 64;

struct Call {
    const char* name;  // a literal of this file, compared by its hash across processes
    uint64_t count;
    int type;
    int extra;  // reduction or root
};

struct Slot {
    std::atomic<pid_t> pid;
    std::atomic<uint64_t> arrivals;
    const void* address;
    uint64_t count;
    uint64_t name_hash;
    int type;
    int extra;
    char name[24];
    uint64_t counts[kMaxRanks], displacements[kMaxRanks];
};

struct Shared {
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> waiting;
    std::atomic<uint32_t> generation;
    Slot slots[kMaxRanks];
};

struct Communicator {
    Shared* shared;
    uint32_t size, rank;
    std::string name;
    uint32_t buffer_mib;
    uint64_t sent[kMaxRanks] = {}, received[kMaxRanks] = {};
    Slot& mine() { return shared->slots[rank]; }
    std::string path() const { return std::string(sim::settings().run_dir) + "/" + name; }
    std::string message(uint32_t from, uint32_t to, uint64_t number) const {
        return path() + "." + std::to_string(from) + "to" + std::to_string(to) + "." + std::to_string(number);
    }
};

uint32_t last_buffer_mib = 0;
std::mutex table;
std::map<std::string, Communicator*> by_name;  // of this process

double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

// Spins, then sleeps, until `done`; false when the deadline passes.
bool wait_until(const std::function<bool()>& done) {
    const double deadline = now_s() + sim::settings().timeout_s;
    for (long turn = 0; !done(); turn++) {
        if (turn < 200) {
            sched_yield();
        } else {
            usleep(turn < 2000 ? 50 : 500);
            if (now_s() > deadline) return false;
        }
    }
    return true;
}

size_t element_size(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
        default: sim::unhandled("an HCCL data type");
    }
}

uint64_t hash(const char* text) {
    uint64_t value = 14695981039346656037ull;
    for (; *text; text++) value = (value ^ static_cast<unsigned char>(*text)) * 1099511628211ull;
    return value;
}

HcclResult barrier(Communicator* comm, const char* what) {
    Shared* shared = comm->shared;
    const uint32_t generation = shared->generation.load();
    comm->mine().arrivals.fetch_add(1);
    if (shared->waiting.fetch_add(1) + 1 == comm->size) {
        shared->waiting.store(0);
        shared->generation.fetch_add(1);
        return HCCL_SUCCESS;
    }
    if (wait_until([&] { return shared->generation.load() != generation; })) return HCCL_SUCCESS;
    std::string missing;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (shared->slots[rank].arrivals.load() < comm->mine().arrivals.load()) missing += " " + std::to_string(rank);
    sim::complain("HCCL %s in %s: rank %u of %u waited %.0f s for rank(s)%s", what, comm->name.c_str(), comm->rank, comm->size,
                  sim::settings().timeout_s, missing.c_str());
    return HCCL_E_TIMEOUT;
}

HcclResult read_peer(Communicator* comm, uint32_t rank, void* to, const void* from, size_t bytes) {
    if (rank == comm->rank) {
        memmove(to, from, bytes);
        return HCCL_SUCCESS;
    }
    for (size_t done = 0; done < bytes;) {
        iovec local = {static_cast<char*>(to) + done, bytes - done};
        iovec remote = {const_cast<char*>(static_cast<const char*>(from)) + done, bytes - done};
        ssize_t count = process_vm_readv(comm->shared->slots[rank].pid.load(), &local, 1, &remote, 1, 0);
        if (count <= 0) {
            sim::complain("cannot read the memory of rank %u: %s (the simulator needs ptrace permission between its ranks)",
                          rank, strerror(errno));
            return HCCL_E_INTERNAL;
        }
        done += count;
    }
    return HCCL_SUCCESS;
}

// Of a communicator, or HCCL's for one that is made without a size of its own.
uint32_t buffer_mib(const HcclCommConfig* config) {
    if (config && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) return config->hcclBufferSize;
    const char* given = getenv("HCCL_BUFFSIZE");
    return given ? atoi(given) : 200;
}

HcclResult join(uint32_t size, const std::string& name, uint32_t rank, uint32_t buffer_mib, HcclComm* result) {
    if (size > kMaxRanks || rank >= size) return HCCL_E_PARA;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    auto* comm = new Communicator{nullptr, size, rank, name, buffer_mib};
    int file = open(comm->path().c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) {
        sim::complain("cannot create %s: %s", comm->path().c_str(), strerror(errno));
        return HCCL_E_OPEN_FILE_FAILURE;
    }
    comm->shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    comm->mine().pid.store(getpid());
    // nobody looks for the file once all have mapped it, and what has no name cannot be left behind
    if (comm->shared->joined.fetch_add(1) + 1 == size) unlink(comm->path().c_str());
    if (!wait_until([&] { return comm->shared->joined.load() >= size; })) {
        std::string missing;
        for (uint32_t peer = 0; peer < size; peer++)
            if (!comm->shared->slots[peer].pid.load()) missing += " " + std::to_string(peer);
        sim::complain("HCCL communicator %s: rank(s)%s of %u never joined", name.c_str(), missing.c_str(), size);
        unlink(comm->path().c_str());
        return HCCL_E_TIMEOUT;
    }
    sim::trace("joined %s as rank %u of %u", name.c_str(), rank, size);
    std::lock_guard<std::mutex> lock(table);
    by_name[name] = comm;
    *result = comm;
    return HCCL_SUCCESS;
}

// Publishes this rank's call, waits for all, and compares what the others asked for.
HcclResult meet(Communicator* comm, const void* address, const Call& call) {
    if (sim::capturing()) sim::unhandled("a collective within a captured graph");
    Slot& slot = comm->mine();
    slot.address = address;
    slot.count = call.count;
    slot.type = call.type;
    slot.extra = call.extra;
    slot.name_hash = hash(call.name);
    snprintf(slot.name, sizeof slot.name, "%s", call.name);
    sim::trace("%s count %lu type %d in %s", call.name, static_cast<unsigned long>(call.count), call.type, comm->name.c_str());
    if (HcclResult error = barrier(comm, call.name)) return error;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        const Slot& peer = comm->shared->slots[rank];
        if (peer.name_hash != slot.name_hash || peer.count != slot.count || peer.type != slot.type || peer.extra != slot.extra) {
            sim::complain("HCCL mismatch in %s: rank %u calls %s(count %lu, type %d, op or root %d), rank %u calls %s(count %lu, "
                          "type %d, op or root %d)", comm->name.c_str(), comm->rank, slot.name, slot.count, slot.type, slot.extra,
                          rank, peer.name, peer.count, peer.type, peer.extra);
            return HCCL_E_PARA;
        }
    }
    return HCCL_SUCCESS;
}

aclDataType acl_type(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_FP16: return ACL_FLOAT16;
        case HCCL_DATA_TYPE_BFP16: return ACL_BF16;
        case HCCL_DATA_TYPE_FP32: return ACL_FLOAT;
        case HCCL_DATA_TYPE_FP64: return ACL_DOUBLE;
        default: sim::unhandled("an HCCL floating type");
    }
}

template <typename Load>
void accumulate(HcclReduceOp op, bool first, auto* sums, uint64_t count, Load load) {
    for (uint64_t i = 0; i < count; i++) {
        auto value = load(i);
        if (first) sums[i] = value;
        else if (op == HCCL_REDUCE_SUM) sums[i] += value;
        else if (op == HCCL_REDUCE_PROD) sums[i] *= value;
        else if (op == HCCL_REDUCE_MAX) sums[i] = value > sums[i] ? value : sums[i];
        else sums[i] = value < sums[i] ? value : sums[i];
    }
}

// Reduces elements [offset, offset + count) of every rank's buffer into `result`. Floats are summed in double and rounded
// once; integers keep their own type. `store` must run after a barrier when `result` may overlap a buffer that peers read.
template <typename T>
HcclResult reduce_integers(Communicator* comm, uint64_t offset, uint64_t count, HcclReduceOp op, std::vector<char>& result) {
    std::vector<T> part(count), sums(count);
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        const T* from = static_cast<const T*>(comm->shared->slots[rank].address) + offset;
        if (HcclResult error = read_peer(comm, rank, part.data(), from, count * sizeof(T))) return error;
        accumulate(op, rank == 0, sums.data(), count, [&](uint64_t i) { return part[i]; });
    }
    memcpy(result.data(), sums.data(), count * sizeof(T));
    return HCCL_SUCCESS;
}

HcclResult reduce_floats(Communicator* comm, uint64_t offset, uint64_t count, HcclDataType type, HcclReduceOp op,
                         std::vector<char>& result) {
    const aclDataType element = acl_type(type);
    const size_t size = element_size(type);
    std::vector<char> part(count * size);
    std::vector<double> sums(count);
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        const char* from = static_cast<const char*>(comm->shared->slots[rank].address) + offset * size;
        if (HcclResult error = read_peer(comm, rank, part.data(), from, count * size)) return error;
        accumulate(op, rank == 0, sums.data(), count, [&](uint64_t i) { return sim::load_element(part.data(), i, element); });
    }
    for (uint64_t i = 0; i < count; i++) sim::store_element(result.data(), i, element, sums[i]);
    return HCCL_SUCCESS;
}

HcclResult reduce(Communicator* comm, uint64_t offset, uint64_t count, HcclDataType type, HcclReduceOp op, std::vector<char>& to) {
    to.resize(count * element_size(type));
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return reduce_integers<int8_t>(comm, offset, count, op, to);
        case HCCL_DATA_TYPE_UINT8: return reduce_integers<uint8_t>(comm, offset, count, op, to);
        case HCCL_DATA_TYPE_INT16: return reduce_integers<int16_t>(comm, offset, count, op, to);
        case HCCL_DATA_TYPE_INT32: return reduce_integers<int32_t>(comm, offset, count, op, to);
        case HCCL_DATA_TYPE_INT64: return reduce_integers<int64_t>(comm, offset, count, op, to);
        default: return reduce_floats(comm, offset, count, type, op, to);
    }
}

}  // namespace

SIM_API uint32_t npu_sim_last_buffer_mib() { return last_buffer_mib; }

// ---- communicators
SIM_API const char* HcclGetErrorString(HcclResult) { return "[npu-sim] see the message on stderr"; }
SIM_API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
SIM_API HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    static std::atomic<int> number{0};
    memset(info, 0, sizeof *info);
    snprintf(info->internal, sizeof info->internal, "npu_sim_%d_%d_%ld", getpid(), number++, static_cast<long>(now_s() * 1e6));
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
    return join(size, info->internal, rank, buffer_mib(nullptr), comm);
}
SIM_API HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config,
                                              HcclComm* comm) {
    last_buffer_mib = config->hcclBufferSize;
    return join(size, info->internal, rank, buffer_mib(config), comm);
}
SIM_API HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t size, uint32_t* ranks, uint64_t id, uint32_t rank,
                                           HcclCommConfig* config, HcclComm* comm) {
    last_buffer_mib = config->hcclBufferSize;
    std::string name = static_cast<Communicator*>(*parent)->name + "_" + std::to_string(id);
    for (uint32_t i = 0; i < size; i++) name += "_" + std::to_string(ranks[i]);
    return join(size, name, rank, buffer_mib(config), comm);
}
SIM_API HcclResult HcclCommDestroy(HcclComm handle) {
    auto* comm = static_cast<Communicator*>(handle);
    {
        std::lock_guard<std::mutex> lock(table);
        by_name.erase(comm->name);
    }
    munmap(comm->shared, sizeof(Shared));
    delete comm;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclGetCommName(HcclComm comm, char* name) {
    snprintf(name, COMM_NAME_MAX_LENGTH, "%s", static_cast<Communicator*>(comm)->name.c_str());
    return HCCL_SUCCESS;
}
// Operators that exchange by themselves (MC2) know a communicator by its name.
SIM_API HcclResult HcomGetCommHandleByGroup(const char* name, HcclComm* comm) {
    std::lock_guard<std::mutex> lock(table);
    auto found = by_name.find(name);
    if (found == by_name.end()) return HCCL_E_PARA;
    *comm = found->second;
    return HCCL_SUCCESS;
}
SIM_API uint32_t npu_sim_buffer_mib(HcclComm comm) { return static_cast<Communicator*>(comm)->buffer_mib; }
SIM_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
    *size = static_cast<Communicator*>(comm)->size;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    *rank = static_cast<Communicator*>(comm)->rank;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

// ---- collectives
SIM_API HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                                 aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    std::vector<char> result;
    if (HcclResult error = meet(comm, from, {"AllReduce", count, type, op})) return error;
    if (HcclResult error = reduce(comm, 0, count, type, op, result)) return error;
    if (HcclResult error = barrier(comm, "AllReduce")) return error;
    memcpy(to, result.data(), result.size());
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                              HcclComm handle, aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    std::vector<char> result;
    if (HcclResult error = meet(comm, from, {"Reduce", count, type, static_cast<int>(op * 1000 + root)})) return error;
    if (comm->rank == root)
        if (HcclResult error = reduce(comm, 0, count, type, op, result)) return error;
    if (HcclResult error = barrier(comm, "Reduce")) return error;
    if (comm->rank == root) memcpy(to, result.data(), result.size());
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                                     aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    std::vector<char> result;
    if (HcclResult error = meet(comm, from, {"ReduceScatter", count, type, op})) return error;
    if (HcclResult error = reduce(comm, comm->rank * count, count, type, op, result)) return error;
    if (HcclResult error = barrier(comm, "ReduceScatter")) return error;
    memcpy(to, result.data(), result.size());
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    if (HcclResult error = meet(comm, buffer, {"Broadcast", count, type, static_cast<int>(root)})) return error;
    if (comm->rank != root)
        if (HcclResult error = read_peer(comm, root, buffer, comm->shared->slots[root].address, count * element_size(type)))
            return error;
    return barrier(comm, "Broadcast");
}
SIM_API HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    const size_t bytes = count * element_size(type);
    if (HcclResult error = meet(comm, from, {"AllGather", count, type, 0})) return error;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (HcclResult error = read_peer(comm, rank, static_cast<char*>(to) + rank * bytes, comm->shared->slots[rank].address, bytes))
            return error;
    return barrier(comm, "AllGather");
}
SIM_API HcclResult HcclScatter(void* from, void* to, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                               aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    const size_t bytes = count * element_size(type);
    if (HcclResult error = meet(comm, from, {"Scatter", count, type, static_cast<int>(root)})) return error;
    const char* source = static_cast<const char*>(comm->shared->slots[root].address) + comm->rank * bytes;
    if (HcclResult error = read_peer(comm, root, to, source, bytes)) return error;
    return barrier(comm, "Scatter");
}
SIM_API HcclResult HcclAlltoAllV(const void* from, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                                 const void* to, const void* receive_counts, const void* receive_offsets,
                                 HcclDataType receive_type, HcclComm handle, aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    const auto* expected = static_cast<const uint64_t*>(receive_counts);
    const auto* offsets = static_cast<const uint64_t*>(receive_offsets);
    const size_t size = element_size(send_type);
    if (send_type != receive_type) return HCCL_E_PARA;
    memcpy(comm->mine().counts, send_counts, comm->size * sizeof(uint64_t));
    memcpy(comm->mine().displacements, send_offsets, comm->size * sizeof(uint64_t));
    if (HcclResult error = meet(comm, from, {"AlltoAllV", 0, send_type, 0})) return error;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        const Slot& peer = comm->shared->slots[rank];
        if (peer.counts[comm->rank] != expected[rank]) {
            sim::complain("HCCL AlltoAllV in %s: rank %u expects %lu elements from rank %u, which sends %lu", comm->name.c_str(),
                          comm->rank, expected[rank], rank, peer.counts[comm->rank]);
            return HCCL_E_PARA;
        }
        char* target = static_cast<char*>(const_cast<void*>(to)) + offsets[rank] * size;
        const char* source = static_cast<const char*>(peer.address) + peer.displacements[comm->rank] * size;
        if (HcclResult error = read_peer(comm, rank, target, source, expected[rank] * size)) return error;
    }
    return barrier(comm, "AlltoAllV");
}
SIM_API HcclResult HcclAlltoAll(const void* from, uint64_t count, HcclDataType type, const void* to, uint64_t, HcclDataType,
                                HcclComm handle, aclrtStream) {
    auto* comm = static_cast<Communicator*>(handle);
    const size_t bytes = count * element_size(type);
    if (HcclResult error = meet(comm, from, {"AlltoAll", count, type, 0})) return error;
    for (uint32_t rank = 0; rank < comm->size; rank++) {
        char* target = static_cast<char*>(const_cast<void*>(to)) + rank * bytes;
        const char* source = static_cast<const char*>(comm->shared->slots[rank].address) + comm->rank * bytes;
        if (HcclResult error = read_peer(comm, rank, target, source, bytes)) return error;
    }
    return barrier(comm, "AlltoAll");
}
SIM_API HcclResult HcclBarrier(HcclComm handle, aclrtStream) { return barrier(static_cast<Communicator*>(handle), "Barrier"); }

// ---- point to point: a send leaves a file, a receive waits for it; inside a group the receives run at its end, so the
// order of calls within a group does not matter, as with the real library
namespace {
thread_local int group_depth = 0;
thread_local std::vector<std::function<HcclResult()>> pending;

HcclResult send(Communicator* comm, const void* from, size_t bytes, uint32_t to) {
    const std::string path = comm->message(comm->rank, to, comm->sent[to]++), part = path + ".part";
    int file = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0) return HCCL_E_OPEN_FILE_FAILURE;
    for (size_t done = 0; done < bytes;) {
        ssize_t count = write(file, static_cast<const char*>(from) + done, bytes - done);
        if (count <= 0) {
            sim::complain("cannot write %s: %s", part.c_str(), strerror(errno));
            close(file);
            return HCCL_E_SYSCALL;
        }
        done += count;
    }
    close(file);
    return rename(part.c_str(), path.c_str()) ? HCCL_E_SYSCALL : HCCL_SUCCESS;
}

HcclResult receive(Communicator* comm, void* to, size_t bytes, uint32_t from) {
    const std::string path = comm->message(from, comm->rank, comm->received[from]++);
    int file = -1;
    if (!wait_until([&] { return (file = open(path.c_str(), O_RDONLY)) >= 0; })) {
        sim::complain("HCCL Recv in %s: rank %u waited %.0f s for rank %u", comm->name.c_str(), comm->rank,
                      sim::settings().timeout_s, from);
        return HCCL_E_TIMEOUT;
    }
    struct stat facts;
    fstat(file, &facts);
    if (static_cast<size_t>(facts.st_size) != bytes) {
        sim::complain("HCCL Recv in %s: rank %u expects %zu bytes from rank %u, which sent %ld", comm->name.c_str(), comm->rank,
                      bytes, from, static_cast<long>(facts.st_size));
        close(file);
        return HCCL_E_PARA;
    }
    for (size_t done = 0; done < bytes;) {
        ssize_t count = read(file, static_cast<char*>(to) + done, bytes - done);
        if (count <= 0) {
            close(file);
            return HCCL_E_SYSCALL;
        }
        done += count;
    }
    close(file);
    unlink(path.c_str());
    return HCCL_SUCCESS;
}
}  // namespace

SIM_API HcclResult HcclGroupStart() {
    group_depth++;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclGroupEnd() {
    if (--group_depth > 0) return HCCL_SUCCESS;
    std::vector<std::function<HcclResult()>> work;
    work.swap(pending);
    for (auto& run : work)
        if (HcclResult error = run()) return error;
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclSend(void* from, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream) {
    return send(static_cast<Communicator*>(comm), from, count * element_size(type), to);
}
SIM_API HcclResult HcclRecv(void* to, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream) {
    auto run = [=] { return receive(static_cast<Communicator*>(comm), to, count * element_size(type), from); };
    if (group_depth == 0) return run();
    pending.push_back(run);
    return HCCL_SUCCESS;
}
SIM_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
    HcclGroupStart();
    HcclResult error = HCCL_SUCCESS;
    for (uint32_t i = 0; i < count && !error; i++) {
        HcclSendRecvItem& item = items[i];
        error = item.sendRecvType == HCCL_SEND ? HcclSend(item.buf, item.count, item.dataType, item.remoteRank, comm, stream)
                                               : HcclRecv(item.buf, item.count, item.dataType, item.remoteRank, comm, stream);
    }
    HcclResult end = HcclGroupEnd();
    return error ? error : end;
}
