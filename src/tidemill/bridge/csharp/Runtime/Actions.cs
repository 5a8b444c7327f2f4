using System;

namespace Tidemill
{
    /// <summary>A part of an array that can only be read.</summary>
    public readonly struct Values<T>
    {
        private readonly T[] array;
        private readonly int first;

        internal Values(T[] array, int first, int count)
        {
            this.array = array;
            this.first = first;
            Count = count;
        }

        public int Count { get; }

        public T this[int index]
        {
            get
            {
                if ((uint)index >= (uint)Count)
                {
                    throw new ArgumentOutOfRangeException("index", index, "There are " + Count + " values.");
                }
                return array[first + index];
            }
        }

        public void CopyTo(T[] target, int targetFirst)
        {
            Array.Copy(array, first, target, targetFirst, Count);
        }
    }

    /// <summary>The action that an agent's request was answered by. It is as the trainer wrote it: a simulator decides itself what a NaN or an unknown number means.</summary>
    public readonly struct ActionEvent
    {
        private readonly World world;
        private readonly int row;
        private readonly int exchange;

        internal ActionEvent(World world, int agentId, int row)
        {
            this.world = world;
            this.row = row;
            exchange = world.Exchange;
            AgentId = agentId;
        }

        public int AgentId { get; }

        /// <summary>The continuous actions.</summary>
        public Values<float> Continuous
        {
            get
            {
                CheckFresh();
                return new Values<float>(world.ContinuousActions, row * world.ContinuousSize, world.ContinuousSize);
            }
        }

        /// <summary>The number of the action chosen in each branch.</summary>
        public Values<int> Discrete
        {
            get
            {
                CheckFresh();
                return new Values<int>(world.DiscreteActions, row * world.BranchCount, world.BranchCount);
            }
        }

        private void CheckFresh()
        {
            if (world == null || exchange != world.Exchange)
            {
                throw new BridgeException("An action can be read until the next exchange only.");
            }
        }
    }

    /// <summary>A request for which a <see cref="Heuristic"/> chooses; what it does not set is zero.</summary>
    public readonly struct Decision
    {
        private readonly World world;
        private readonly int row;

        internal Decision(World world, int row)
        {
            this.world = world;
            this.row = row;
        }

        public int AgentId { get { return world.Deciding(row); } }

        public float Reward { get { return world.Reward(row); } }

        public Values<float> Observation(int k)
        {
            return new Values<float>(world.Observations[k], row * world.ObservationSizes[k], world.ObservationSizes[k]);
        }

        public bool IsForbidden(int branch, int action)
        {
            CheckIndex("action", action, world.BranchSize(branch));
            return world.IsForbidden(row, branch, action);
        }

        public void SetContinuous(int index, float value)
        {
            CheckIndex("index", index, world.ContinuousSize);
            world.ContinuousActions[row * world.ContinuousSize + index] = value;
        }

        public void SetDiscrete(int branch, int action)
        {
            CheckIndex("branch", branch, world.BranchCount);
            world.DiscreteActions[row * world.BranchCount + branch] = action;
        }

        private static void CheckIndex(string name, int index, int count)
        {
            if ((uint)index >= (uint)count)
            {
                throw new ArgumentOutOfRangeException(name, index, "It should be from 0 to " + (count - 1) + ".");
            }
        }
    }
}
